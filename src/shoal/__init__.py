"""shoal: the missing multi-host layer for JAX.

Launch, agree, place, move, save; and when a process fails, know which one. The tree has floors,
and imports only go down:

* `errors`, `settings`, `colour`: exceptions, environment variables, and which processes must call.
* `plan`: decides what to move where, and moves nothing; NumPy only.
* `runtime`: processes: who is here, alive, agreed.
* `arrays`: device arrays.
* `collectives`: values between processes.
* `checkpoint`: sharded state on disk.
* `compat`: the predecessors' own names, imported by name.
* `draw`, `launch`: pictures; one job on this machine.
* `testing`, `cli`: tools for tests, the command.
* `planning`, `preemption`, `retention`, `types`: modules that only re-export.

What needs NumPy or JAX is loaded when it is first used: the services of a job need neither.
"""

import sys
from typing import TYPE_CHECKING, Any

from shoal import settings as settings
from shoal.errors import CheckpointError as CheckpointError
from shoal.errors import DeadlineError as DeadlineError
from shoal.errors import DivergenceError as DivergenceError
from shoal.errors import DtypeWarning as DtypeWarning
from shoal.errors import InitializeError as InitializeError
from shoal.errors import PeerFailedError as PeerFailedError
from shoal.errors import ProcessLostError as ProcessLostError
from shoal.errors import ShoalError as ShoalError
from shoal.errors import UsageError as UsageError

if TYPE_CHECKING:
    from shoal import compat as compat
    from shoal import planning as planning
    from shoal import preemption as preemption
    from shoal import retention as retention
    from shoal import types as types
    from shoal.arrays.bridge.devices import jax_mesh as jax_mesh
    from shoal.arrays.bridge.sharding import layout_of as layout_of
    from shoal.arrays.bridge.use_mesh import use_mesh as use_mesh
    from shoal.arrays.feeding.feed import feed as feed
    from shoal.arrays.feeding.local_rows import local_rows as local_rows
    from shoal.arrays.host_local.host_local import from_host_local as from_host_local
    from shoal.arrays.host_local.host_local import to_host_local as to_host_local
    from shoal.arrays.make_mesh import make_mesh as make_mesh
    from shoal.arrays.match_layouts import match_layouts as match_layouts
    from shoal.arrays.moving.plan_relayout import plan_relayout as plan_relayout
    from shoal.arrays.moving.relayout import relayout as relayout
    from shoal.arrays.named_sharding import named_sharding as named_sharding
    from shoal.arrays.placing.create import create as create
    from shoal.arrays.placing.put import put as put
    from shoal.arrays.traced.constrain import constrain as constrain
    from shoal.arrays.traced.explain_program import explain_program as explain_program
    from shoal.arrays.traced.manual import manual as manual
    from shoal.arrays.traced.shard_alike import shard_alike as shard_alike
    from shoal.checkpoint.bucket.address import Bucket as Bucket
    from shoal.checkpoint.history.checkpoint_info import checkpoint_info as checkpoint_info
    from shoal.checkpoint.history.checkpoints import Checkpoints as Checkpoints
    from shoal.checkpoint.restoring.restore import plan_restore as plan_restore
    from shoal.checkpoint.restoring.restore import restore as restore
    from shoal.checkpoint.saving.save import save as save
    from shoal.checkpoint.tree.flatten import PerProcess as PerProcess
    from shoal.collectives.allgather import allgather as allgather
    from shoal.collectives.broadcast import broadcast as broadcast
    from shoal.collectives.check_finite import check_finite as check_finite
    from shoal.collectives.check_replicas import check_replicas as check_replicas
    from shoal.collectives.live_processes import live_processes as live_processes
    from shoal.collectives.program import assert_same_program as assert_same_program
    from shoal.collectives.same import assert_same as assert_same
    from shoal.collectives.sync_devices import sync_devices as sync_devices
    from shoal.draw.describe import describe as describe
    from shoal.plan.layout import Layout as Layout
    from shoal.plan.mesh import Mesh as Mesh
    from shoal.runtime.barrier import barrier as barrier
    from shoal.runtime.job_status import job_status as job_status
    from shoal.runtime.log import log as log
    from shoal.runtime.preemption import preempted as preempted
    from shoal.runtime.process import initialize as initialize
    from shoal.runtime.process import is_initialized as is_initialized
    from shoal.runtime.process import process_count as process_count
    from shoal.runtime.process import process_index as process_index
    from shoal.runtime.process import shutdown as shutdown
    from shoal.runtime.step import step as step

__version__ = "0.1.0"

_REEXPORTS = ("compat", "planning", "preemption", "retention", "types")

_LAZY = {
    "Bucket": "shoal.checkpoint.bucket.address",
    "Checkpoints": "shoal.checkpoint.history.checkpoints",
    "Layout": "shoal.plan.layout",
    "Mesh": "shoal.plan.mesh",
    "PerProcess": "shoal.checkpoint.tree.flatten",
    "allgather": "shoal.collectives.allgather",
    "assert_same": "shoal.collectives.same",
    "assert_same_program": "shoal.collectives.program",
    "barrier": "shoal.runtime.barrier",
    "broadcast": "shoal.collectives.broadcast",
    "check_finite": "shoal.collectives.check_finite",
    "check_replicas": "shoal.collectives.check_replicas",
    "checkpoint_info": "shoal.checkpoint.history.checkpoint_info",
    "constrain": "shoal.arrays.traced.constrain",
    "create": "shoal.arrays.placing.create",
    "describe": "shoal.draw.describe",
    "explain_program": "shoal.arrays.traced.explain_program",
    "feed": "shoal.arrays.feeding.feed",
    "from_host_local": "shoal.arrays.host_local.host_local",
    "initialize": "shoal.runtime.process",
    "is_initialized": "shoal.runtime.process",
    "jax_mesh": "shoal.arrays.bridge.devices",
    "job_status": "shoal.runtime.job_status",
    "layout_of": "shoal.arrays.bridge.sharding",
    "live_processes": "shoal.collectives.live_processes",
    "local_rows": "shoal.arrays.feeding.local_rows",
    "log": "shoal.runtime.log",
    "make_mesh": "shoal.arrays.make_mesh",
    "manual": "shoal.arrays.traced.manual",
    "match_layouts": "shoal.arrays.match_layouts",
    "named_sharding": "shoal.arrays.named_sharding",
    "plan_relayout": "shoal.arrays.moving.plan_relayout",
    "plan_restore": "shoal.checkpoint.restoring.restore",
    "preempted": "shoal.runtime.preemption",
    "process_count": "shoal.runtime.process",
    "process_index": "shoal.runtime.process",
    "put": "shoal.arrays.placing.put",
    "relayout": "shoal.arrays.moving.relayout",
    "restore": "shoal.checkpoint.restoring.restore",
    "save": "shoal.checkpoint.saving.save",
    "shard_alike": "shoal.arrays.traced.shard_alike",
    "shutdown": "shoal.runtime.process",
    "step": "shoal.runtime.step",
    "sync_devices": "shoal.collectives.sync_devices",
    "to_host_local": "shoal.arrays.host_local.host_local",
    "use_mesh": "shoal.arrays.bridge.use_mesh",
}

__all__ = [
    "Bucket",
    "CheckpointError",
    "Checkpoints",
    "DeadlineError",
    "DivergenceError",
    "DtypeWarning",
    "InitializeError",
    "Layout",
    "Mesh",
    "PeerFailedError",
    "PerProcess",
    "ProcessLostError",
    "ShoalError",
    "UsageError",
    "allgather",
    "assert_same",
    "assert_same_program",
    "barrier",
    "broadcast",
    "check_finite",
    "check_replicas",
    "checkpoint_info",
    "constrain",
    "create",
    "describe",
    "explain_program",
    "feed",
    "from_host_local",
    "initialize",
    "is_initialized",
    "jax_mesh",
    "job_status",
    "layout_of",
    "live_processes",
    "local_rows",
    "log",
    "make_mesh",
    "manual",
    "match_layouts",
    "named_sharding",
    "plan_relayout",
    "plan_restore",
    "preempted",
    "process_count",
    "process_index",
    "put",
    "relayout",
    "restore",
    "save",
    "shard_alike",
    "shutdown",
    "step",
    "sync_devices",
    "to_host_local",
    "use_mesh",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY and name not in _REEXPORTS:
        import shoal.names as names

        problem = f"module 'shoal' has no attribute {name!r}"
        raise AttributeError("; ".join(filter(None, [problem, names.hint_of(name)])))
    import importlib

    import shoal.runtime.system.interrupts as interrupts

    # The import is long enough for a Ctrl-C, which a callback of the garbage collector would
    # swallow.
    load = interrupts.interrupts_delivered(importlib.import_module)
    module = load(_LAZY.get(name, f"shoal.{name}"))
    globals()[name] = value = module if name in _REEXPORTS else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*__all__, *_REEXPORTS, "errors", "settings", "__version__"]


def _show_in_notebooks() -> None:
    """Register pictures with the notebook that imports this; elsewhere, load nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if shell is None:
        return
    ip = shell()
    if ip is not None:
        import shoal.draw.notebook as notebook

        notebook.register(ip)


_show_in_notebooks()
