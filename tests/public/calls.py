"""Every public function with arguments that are right, and of which kind each argument is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import shoal
from public.wrong import MESH, ROWS
from shoal.checkpoint.planning.policies import (
    Best,
    EverySeconds,
    EverySteps,
    Last,
    LastSeconds,
    Multiples,
)
from shoal.plan.compiled import collectives_of, received_bytes_of
from shoal.plan.cost import cost
from shoal.plan.hardware.links import links_of
from shoal.plan.hlo import (
    group_assignment,
    hlo_text,
    replication_groups,
    sharding_type,
    tile_assignment,
)
from shoal.plan.hlo_reading import layout_of_text
from shoal.plan.placement import place
from shoal.plan.shards import owners, region, replica_index
from shoal.plan.topology import from_devices, from_json, parse, to_json
from shoal.plan.transfer.bounds import bounds
from shoal.plan.transfer.plan import plan_transfer
from shoal.plan.transfer.point_to_point import point_to_point
from shoal.plan.transfer.regions import regions
from shoal.plan.transfer.traffic import traffic_of
from shoal.runtime.clouds import aws, azure, gce

WHOLE = shoal.Layout(MESH, None, None)
TPU = parse("v5e:2x4")
HOST = np.ones((8, 4), np.float32)
JITTED = jax.jit(lambda x: x + x)


class Call(NamedTuple):
    """A function, arguments with which it works, and the kinds of those that are checked."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    kinds: dict[str, str]


def _(name: str, function: Callable[..., Any], given: dict[str, Any], /, **kinds: str) -> Call:
    return Call(name, function, given, kinds)


MEETING = {"processes": "processes?", "timeout_s": "seconds?"}
NAMED = {**MEETING, "name": "name?"}
LANE = {**NAMED, "lane": "name"}
SAID = {"user": "user?", "metrics": "metrics?"}
PATHS = {"form": "choice", "only": "any", "rename": "any", "dtype": "choice", "mode": "choice"}


def value_calls() -> list[Call]:
    """Return those of meshes and layouts."""
    axis = {"axis": "dim?"}
    whole, rank = {"mesh": MESH, "rank": 2}, {"mesh": "mesh", "rank": "count"}
    return [
        _("Mesh", shoal.Mesh, {"axes": {"data": 4}}, axes="any", device_ids="any",
          processes="any", kind="name", label="text", axis_types="choice"),
        _("Mesh.position", MESH.position, {"device_id": 0}, device_id="count"),
        _("Mesh.coords", MESH.coords, {"device_id": 0}, device_id="count"),
        _("Mesh.local", MESH.local, {"process": 0}, process="count"),
        _("Mesh.host_mesh", MESH.host_mesh, {}, per="choice"),
        _("Mesh.submesh", MESH.submesh, {}, data="int"),
        _("Mesh.parse", MESH.parse, {"text": "x=2"}, text="name"),
        _("Layout", lambda mesh, dim=None, **k: shoal.Layout(mesh, dim, **k), {"mesh": MESH},
          mesh="mesh", dim="dim?", partial="any"),
        _("Layout.replicated", ROWS.replicated, whole, **rank),
        _("Layout.batch_sharded", ROWS.batch_sharded, {**whole, "axis": "data"}, **axis, **rank),
        _("Layout.inner_sharded", ROWS.inner_sharded, {**whole, "axis": "data"}, **axis, **rank),
        _("Layout.check_shape", ROWS.check_shape, {"shape": (8, 4)}, shape="shape"),
        _("Layout.shard_shape", ROWS.shard_shape, {"shape": (8, 4)}, shape="shape"),
        _("Layout.global_shape", ROWS.global_shape, {"shard_shape": (8, 4)}, shard_shape="shape"),
        _("Layout.num_shards", ROWS.num_shards, {"dim": 0}, dim="int"),
        _("Layout.parse", ROWS.parse, {"text": "x @ x=2"}, text="name"),
        _("Layout.with_mesh", ROWS.with_mesh, {"mesh": MESH}, mesh="mesh"),
        _("PerProcess", shoal.PerProcess, {"value": 3}, value="any"),
    ]  # fmt: skip


def shard_calls() -> list[Call]:
    """Return those of who holds what, and of XLA's words for it."""
    lay, shape = {"layout": "layout"}, {"layout": "layout", "shape": "shape", "uneven": "choice"}
    held = {"layout": ROWS, "shape": (8, 4)}
    return [
        _("group_assignment", group_assignment, {"layout": ROWS}, **lay),
        _("hlo_text", hlo_text, {"layout": ROWS}, version="count", **lay),
        _("replication_groups", replication_groups, {"layout": ROWS}, **lay),
        _("sharding_type", sharding_type, {"layout": ROWS}, requested="bool", **lay),
        _("tile_assignment", tile_assignment, {"layout": ROWS}, **lay),
        _("layout_of_text", layout_of_text, {"text": "{replicated}"}, text="name"),
        _("collectives_of", collectives_of, {"hlo": ""}, hlo="text"),
        _("received_bytes_of", received_bytes_of, {"hlo": "", "num_devices": 8},
          hlo="text", num_devices="count"),
        _("owners", owners, held, **shape),
        _("region", region, held | {"device_id": 0}, device_id="count", **shape),
        _("replica_index", replica_index, held | {"device_id": 0}, device_id="count", **shape),
    ]  # fmt: skip


def plan_calls() -> list[Call]:
    """Return those that decide about hardware."""
    transfer = plan_transfer(ROWS, WHOLE, (8, 4), 4)
    move = {"source": ROWS, "target": WHOLE, "shape": (8, 4)}
    ends = {"source": "layout", "target": "layout", "shape": "shape"}
    sized = {**ends, "item_bytes": "count", "topology": "topology?"}
    return [
        _("regions", regions, move, **ends),
        _("bounds", bounds, move | {"item_bytes": 4}, **sized),
        _("point_to_point", point_to_point, move | {"item_bytes": 4}, **sized),
        _("cost", cost, {"topology": TPU, "mesh": shoal.Mesh({"data": 8}), "axis": "data",
          "collective": "all_reduce", "num_bytes": 8}, topology="topology", mesh="mesh",
          collective="choice", axis="axis", num_bytes="count", links="other?"),
        _("links_of", links_of, {"topology": TPU}, topology="topology",
          link_bytes_per_s="seconds?", network_bytes_per_s="seconds?"),
        _("place", place, {"topology": TPU, "axes": {"data": 8}}, topology="topology", axes="any",
          across="amounts?", weights="amounts?", compatible_with="choice?", rings="any",
          allow_split_physical_axes="bool?", contiguous_submeshes="bool"),
        _("from_devices", from_devices, {"devices": jax.devices()}, devices="any", within="any"),
        _("from_json", from_json, {"values": to_json(TPU)}, values="any"),
        _("parse", parse, {"text": "v5e:2x4"}, text="name"),
        _("to_json", to_json, {"topology": TPU}, topology="topology",
          links="any"),
        _("plan_transfer", plan_transfer, move | {"item_bytes": 4}, links="other?", **sized),
        _("traffic_of", traffic_of, {"plan": transfer}, plan="other", topology="topology?"),
    ]  # fmt: skip


def moving_calls(x: jax.Array) -> list[Call]:
    """Return those that move arrays; `x` lies in rows, and none of them gives it up."""
    tree = {"tree": x, "layouts": WHOLE}
    planned = shoal.plan_relayout(x, WHOLE, way="collectives")

    def again(tree: Any, layouts: Any, **options: Any) -> Any:
        return shoal.relayout(shoal.put(HOST, ROWS) if tree is x else tree, layouts, **options)

    return [
        _("describe", shoal.describe, {"x": ROWS}, x="array", shape="any"),
        _("enter_manual", shoal.compat.enter_manual, tree | {"layouts": ROWS}, layouts="layouts"),
        _("layout_of", shoal.layout_of, {"x": x}, x="array"),
        _("leave_manual", shoal.compat.leave_manual, {"shards": shoal.compat.enter_manual(x, ROWS),
          "layouts": ROWS, "full_shape": (8, 4)}, shards="array", layouts="layouts",
          full_shape="shape", like="any"),
        _("local_rows", shoal.local_rows, {"layout": ROWS, "global_batch": 8}, layout="layout",
          global_batch="count", dim="int", process="count?"),
        _("plan_relayout", shoal.plan_relayout, {"tree": x, "layouts": WHOLE}, tree="any",
          layouts="layouts", way="choice?"),
        _("RelayoutPlan.staged_peak_bytes", planned.staged_peak_bytes, {"donate": False},
          donate="bool"),
        _("RelayoutPlan.seconds", planned.seconds, {"topology": TPU}, topology="topology"),
        _("RelayoutPlan.traffic", planned.traffic, {"topology": TPU}, topology="topology?"),
        _("relayout", again, tree, tree="any", layouts="layouts", donate="bool", staged="bool",
          way="choice?", timeout_s="seconds?"),
        _("jax_mesh", shoal.jax_mesh, {"mesh": MESH}, mesh="mesh", devices="any"),
        _("named_sharding", shoal.named_sharding, {"layouts": ROWS}, layouts="layout", mesh="mesh?",
          devices="any"),
        _("to_host_local", shoal.to_host_local, tree | {"layouts": ROWS}, layouts="layouts"),
        _("unpack", shoal.compat.unpack, {"tree": x}, tree="any"),
        _("use_mesh", lambda mesh: shoal.use_mesh(mesh).__enter__(), {"mesh": MESH}, mesh="mesh"),
    ]  # fmt: skip


def traced_calls(x: jax.Array) -> list[Call]:
    """Return those that stand inside `jit`, and outside."""
    tree = {"tree": x, "layouts": WHOLE}
    return [
        _("constrain", shoal.constrain, tree, tree="any", layouts="layouts?", gradient="bool",
          via="other?"),
        _("constrain in jit", lambda **k: jax.jit(lambda t: shoal.constrain(t, WHOLE, **k))(x), {},
          gradient="bool", via="other?"),
        _("explain_program", lambda jitted: shoal.explain_program(jitted, x), {"jitted": JITTED},
          jitted="call"),
        _("fence", lambda target, **k: shoal.compat.fence(target, **k), {"target": x}, target="any",
          backward="bool"),
        _("linear", shoal.compat.linear, {"x": HOST, "weight": HOST}, x="array",
          weight="array", bias="any", layout="layouts?", preferred_element_type="any"),
        _("manual", lambda **k: jax.jit(shoal.manual(**k))(x),
          {"fn": lambda a: a, "in_layouts": ROWS, "out_layouts": ROWS}, fn="call",
          in_layouts="layouts?", out_layouts="layouts?", axes="any"),
        _("shard_alike", lambda **k: jax.jit(lambda a, b: shoal.shard_alike(a, b, **k))(x, x), {},
          gradient="bool"),
        _("shard_alike outside", shoal.shard_alike, {"a": x, "b": x}, a="any", b="any",
          gradient="bool"),
    ]  # fmt: skip


def placing_calls(x: jax.Array) -> list[Call]:
    """Return those that place values on devices."""
    rows = {"tree": HOST, "layouts": ROWS}
    own = {"layouts": "layouts", "check_values": "bool", "lane": "name?"}
    return [
        _("create", lambda init, layouts: shoal.create(init, layouts=layouts),
          {"init": lambda: jax.numpy.ones((8, 4)), "layouts": ROWS}, init="call",
          layouts="layouts"),
        _("feed", lambda source, layouts, **k: next(iter(shoal.feed(source, layouts, **k)), None),
          {"source": np.ones((16, 4), np.float32), "layouts": ROWS, "batch": 8}, source="any",
          batch="count", order="order?", remainder="choice", start="count", skip="bool?",
          prefetch="count", timeout_s="seconds?", **own),
        _("from_host_local", shoal.from_host_local, rows, tree="any", **own),
        _("match_layouts", shoal.match_layouts, {"rules": {"**": ROWS}, "shapes": {"w": x}},
          rules="any",
          shapes="any", mesh="mesh?", all_rules="bool"),
        _("make_mesh", shoal.make_mesh, {"axes": {"data": -1}}, axes="any", devices="any",
          order="choice?", across="amounts?", compatible_with="choice?",
          allow_split_physical_axes="bool?", axis_names="any", axis_types="choice",
          timeout_s="seconds?", lane="name"),
        _("pack", shoal.compat.pack, {"pieces": [np.ones((2, 4), np.float32)] * 8, "layouts": ROWS},
          pieces="array", layouts="layouts", like="any", lane="name?"),
        _("put", shoal.put, rows, tree="any", **own),
    ]  # fmt: skip


def job_calls(x: jax.Array) -> list[Call]:
    """Return those that processes call together, or of the job."""
    tree = {"tree": 3}
    return [
        _("allgather", shoal.allgather, tree, tree="any", tiled="bool", to="count?", **LANE),
        _("assert_same", shoal.assert_same, tree, tree="any", **LANE),
        _("assert_same_program", lambda jitted, **k: shoal.assert_same_program(jitted, x, **k),
          {"jitted": JITTED}, jitted="call", name="name?", timeout_s="seconds?"),
        _("check_finite", shoal.check_finite, tree, tree="any", **LANE),
        _("check_replicas", shoal.check_replicas, tree, tree="any", **LANE),
        _("barrier", shoal.barrier, {"name": "b"}, **(LANE | {"name": "name"})),
        _("broadcast", shoal.broadcast, tree, tree="any", source="count", is_source="bool?",
          **LANE),
        _("sync_devices", shoal.sync_devices, {"mesh": MESH}, mesh="mesh", name="name?",
          timeout_s="seconds?"),
        _("live_processes", shoal.live_processes, {}, lane="name", **MEETING),
        _("preempted", shoal.preempted, {"step": 0}, step="count",
          timeout_s="seconds?"),
        _("preemption.clear", shoal.preemption.clear, {}, processes="processes?",
          timeout_s="seconds?"),
        _("job_status", shoal.job_status, {}, timeout_s="seconds?"),
        _("preemption.mark_saved", shoal.preemption.mark_saved, {}, step="count?"),
        _("log", shoal.log, {}),
        _("step", shoal.step, {"number": 3}, number="count", within_s="seconds?"),
        _("preemption.watch", shoal.preemption.watch, {}, signals="any", files="any", poll="any",
          every_s="seconds", grace_s="seconds?"),
    ]  # fmt: skip


def checkpoint_calls(folder: str, x: jax.Array) -> list[Call]:
    """Return those of one checkpoint; what is saved at `folder`/saved stays as it is."""
    saved, fresh = f"{folder}/saved", iter(range(10**6))
    shoal.save(saved, {"w": x})
    tree = {"tree": {"w": x}}

    def save(tree: Any, **options: Any) -> None:
        shoal.save(f"{folder}/{next(fresh)}", tree, **options)

    return [
        _("Bucket", shoal.Bucket, {"url": "s3://bucket/run", "skip_signature": True}, url="path",
          single_writer="bool", store="any"),
        _("save", save, tree, tree="any", step="count?", overwrite="bool", **SAID, **LANE),
        _("save where", shoal.save, tree | {"path": f"{folder}/where"}, path="path"),
        _("restore", shoal.restore, {"path": saved}, path="path", target="any",
          max_host_bytes="count?", merge="call?", **PATHS, **LANE),
        _("restore into", shoal.restore, {"path": saved, "target": {"w": ROWS}}, target="any",
          only="any", rename="any", missing_ok="bool"),
        _("plan_restore", shoal.plan_restore, {"path": saved}, path="path", target="any",
          dtype="choice", mode="choice", only="any", rename="any"),
        _("checkpoint_info", shoal.checkpoint_info, {"path": saved}, path="path"),
    ]  # fmt: skip


def history_calls(folder: str, x: jax.Array) -> list[Call]:
    """Return those of a history of steps."""
    fresh = iter(range(10**6))
    history = shoal.Checkpoints(f"{folder}/history")
    history.save(1, {"w": x})
    history.wait()
    step, waits = {"step": 1}, {"timeout_s": "seconds?"}

    def begin(**options: Any) -> None:
        shoal.Checkpoints(f"{folder}/of{next(fresh)}", **options).close()

    def save_step(**options: Any) -> None:
        with shoal.Checkpoints(f"{folder}/of{next(fresh)}") as new:
            new.save(**({"step": 5, "state": {"w": x}} | options))

    return [
        _("Checkpoints", begin, {}, keep="count?", every="any", on_commit="call?",
          asynchronous="bool", recover="bool", check_replicas="bool",
          lease_s="seconds?", **MEETING),
        _("checkpoint_info of a step", shoal.checkpoint_info,
          {"path": f"{folder}/history"} | step, step="count?"),
        _("Checkpoints where", shoal.Checkpoints, {"path": f"{folder}/steps"}, path="path"),
        _("all_steps", history.all_steps, {}, skip_corrupt="bool"),
        _("latest", history.latest, {}, skip_corrupt="bool"),
        _("all_metrics", history.all_metrics, {}, skip_corrupt="bool"),
        _("best_step", history.best_step, {"metric": "loss"}, metric="name", mode="choice",
          skip_corrupt="bool"),
        _("Checkpoints.info", history.info, step, step="count?"),
        _("path_of", history.path_of, step, step="count"),
        _("pin", history.pin, step, step="count"),
        _("unpin", history.unpin, step, step="count"),
        _("should_save", history.should_save, step, step="count"),
        _("wait", history.wait, {}, timeout_s="wait?"),
        _("Checkpoints.restore", history.restore, step, step="count?", target="any",
          skip_corrupt="bool", **waits, **PATHS),
        _("resume", history.resume, {"target": None, "init": {"w": x}}, target="any",
          skip_corrupt="bool", check_init="bool", **waits, **PATHS),
        _("resume nothing", shoal.Checkpoints(f"{folder}/empty").resume,
          {"target": None, "init": {"w": x}}, skip_corrupt="bool", check_init="bool", **waits),
        _("Checkpoints.save", save_step, {}, step="count", state="any", force="bool",
          timeout_s="wait?", **SAID),
        _("delete", history.delete, step, step="count"),  # deletes: the last one
    ]  # fmt: skip


def policy_calls() -> list[Call]:
    """Return those of which steps are kept, and of which clouds are watched."""
    return [
        _("Last", Last, {"n": 2}, n="count"),
        _("EverySteps", EverySteps, {"n": 2}, n="count"),
        _("EverySeconds", EverySeconds, {"s": 2.0}, s="seconds"),
        _("LastSeconds", LastSeconds, {"s": 2.0}, s="seconds"),
        _("Multiples", Multiples, {"n": 2}, n="count"),
        _(
            "Best",
            Best,
            {"n": 2, "metric": "loss"},
            n="count",
            metric="name",
            mode="choice",
            missing_ok="bool",
        ),
        _("gce", gce, {}, url="name"),
        _("aws", aws, {}, url="name"),
        _("azure", azure, {}, url="name", machines="any"),
    ]


def all_calls(folder: str) -> dict[str, Call]:
    """Return all of them, by name."""
    x = shoal.put(HOST, ROWS)
    found = [*value_calls(), *shard_calls(), *plan_calls(), *moving_calls(x), *traced_calls(x)]
    found += [*placing_calls(x), *job_calls(x), *checkpoint_calls(folder, x)]
    found += [*policy_calls(), *history_calls(folder, x)]
    return {call.name: call for call in found}
