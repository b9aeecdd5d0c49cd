"""One restore: all processes open the same checkpoint, read, and end alike."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

from shoal.checkpoint.blocks.memory import uncollected
from shoal.checkpoint.coordination.lead import decode_error, encode_error, failed_processes
from shoal.checkpoint.coordination.lease import ProgressReporter
from shoal.checkpoint.coordination.one_folder import different_folders
from shoal.checkpoint.format.records import Manifest
from shoal.checkpoint.restoring import target as targets
from shoal.checkpoint.restoring.filling import Filling, Restorer, fill, on_host
from shoal.checkpoint.restoring.read_strategy import Geometry, ReadStrategy, choose
from shoal.checkpoint.restoring.target import LeafRequest, LeafRequests, TargetLeaf, TargetOptions
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.store.opening import Checkpoint, deleted_meanwhile, open_checkpoint
from shoal.checkpoint.tree import flatten
from shoal.checkpoint.tree import nodes as tree_nodes
from shoal.checkpoint.tree.names import ROOT, component
from shoal.errors import (
    CorruptCheckpointError,
    DivergenceError,
    NotCommittedError,
    NotSharedError,
    PeerFailedError,
    StorageError,
    raise_all,
)
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.failures.process_text import listed
from shoal.runtime.system import fault_points

_LOG = logging.getLogger("shoal")

Value = TypeVar("Value")


class RestoreRequest(NamedTuple):
    """The arguments of a restore on one process."""

    store: Store
    options: TargetOptions
    mode: str
    wanted: Sequence[TargetLeaf] = ()
    given: Sequence[Any] = ()  # the leaves of the target
    rebuild: Callable[[list[Any]], Any] | None = None  # the target with other leaves; None: none
    merge: Callable[[list[Any]], Any] | None = None
    form: str = "tree"  # of the result, without a target
    max_host_bytes: int = 0  # of temporary memory

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines that must be equal on all processes."""
        options = self.options
        renames = options.rename if isinstance(options.rename, Mapping) else bool(options.rename)
        return (
            f"only={options.only!r}, dtype={options.dtype!r}, mode={self.mode!r}",
            f"form={self.form!r}, missing_ok={options.missing_ok}",
            f"rename={renames!r}, merge={self.merge is not None}",
            *(leaf.line for leaf in self.wanted),
        )


class Opened(NamedTuple):
    """An open checkpoint, and what to restore from it."""

    checkpoint: Checkpoint
    requests: LeafRequests
    geometry: Geometry | None  # None: nothing is placed on devices
    strategy: ReadStrategy


def parse_request(store: Store, target: Any, options: TargetOptions, mode: str) -> RestoreRequest:
    """Parse a target.

    Raises:
      UsageError: it is not a valid target.
    """
    if target is None:
        return RestoreRequest(store, options, mode)
    from shoal.checkpoint.restoring.wanted import target_of

    return RestoreRequest(store, options, mode, *target_of(target))


def open_for(request: RestoreRequest) -> Opened:
    """Open the checkpoint, and match the target with it.

    Raises:
      RestoreMismatchError, NotCommittedError, CorruptCheckpointError, UnsupportedCheckpointError,
      StorageError.
    """
    checkpoint = open_checkpoint(request.store)
    geometry = None
    leaf_requests = leaf_requests_of(request, checkpoint.manifest)
    if any(leaf_request.place is not None for leaf_request in leaf_requests.all):
        from shoal.checkpoint.restoring.placing import geometry as geometry_of_devices

        geometry = geometry_of_devices()
    return Opened(
        checkpoint,
        leaf_requests,
        geometry,
        choose(checkpoint, leaf_requests.all, request.mode, geometry),
    )


def leaf_requests_of(request: RestoreRequest, manifest: Manifest) -> LeafRequests:
    """Match the target of a request with a checkpoint; without one, take all leaves.

    Raises:
      RestoreMismatchError: they do not match.
    """
    if request.rebuild is None:
        return targets.all_of(manifest, request.options)
    from shoal.checkpoint.restoring.wanted import fit

    return targets.match(manifest, request.wanted, request.options, fit)


class Restore:
    """The steps of one restore on one process."""

    def __init__(
        self,
        client: JobClient,
        request: RestoreRequest,
        call: Call,
        timeout_s: float,
        group: Group,
        lane: str,
    ) -> None:
        self._client, self._request, self._group = client, request, group
        self._lane = lane
        self._call, self._timeout_s = call, timeout_s  # per wait: reading may take long
        self._me = ThisProcess(client.process, client.hosts)

    def run(self) -> Any:
        """Run all steps."""
        opened = _tried(lambda: open_for(self._request))
        brought = opened if isinstance(opened, Exception) else _identity(opened, self._group)
        fault_points.reach("restore.before_arrive", self._client.process)
        answers = self._meet(self._call, brought)
        if isinstance(opened, Exception):
            raise opened  # not reached: `_meet` raises the error that it is given
        self._same(answers)
        self._refuse_other_devices(opened, answers)
        fault_points.reach("restore.read", self._client.process)
        values = _tried(lambda: self._read(opened, self._request.max_host_bytes))
        call = self._call._replace(spec=(opened.checkpoint.commit.attempt,))
        self._meet(call, values if isinstance(values, Exception) else b"")
        if isinstance(values, Exception):
            raise values  # not reached
        self._exchange(opened, values)
        return built(self._request, opened.checkpoint.manifest, opened.requests, values)

    def _meet(self, call: Call, brought: bytes | Exception) -> Mapping[int, bytes]:
        """Exchange payloads with all processes; if one of them failed, raise its error on all."""
        problem = brought if isinstance(brought, Exception) else None
        payload = encode_error(brought) if isinstance(brought, Exception) else brought
        answers = agree(
            self._client,
            call,
            payload,
            timeout_s=self._timeout_s,
            group=self._group.named,
            lane=self._lane,
        )
        who = failed_processes(answers)
        if not who:
            return answers
        error = decode_error(answers[who[0]], who[0], self._me)
        is_opening = call is self._call  # later, it may have been deleted for all
        if is_opening and isinstance(error, NotCommittedError) and len(who) < len(answers):
            raise self._not_shared(who, answers) from problem
        is_own = problem is not None and type(problem) is type(error)
        is_first = problem is not None and isinstance(error, PeerFailedError)
        if problem is not None and (is_own or (is_first and who[0] == self._me.process)):
            raise problem
        raise error from problem

    def _not_shared(
        self, who: tuple[int, ...], answers: Mapping[int, bytes]
    ) -> NotSharedError | DivergenceError:
        path = self._request.store.path
        paths = {p: json.loads(text)["path"] for p, text in answers.items() if p not in who}
        paths |= {p: getattr(decode_error(answers[p], p, self._me), "path", path) for p in who}
        if len({*paths.values()}) > 1:
            return different_folders(self._client, "restore", paths)
        names = ", ".join(self._me.name(process) for process in who)
        return NotSharedError(
            f"{self._me}: restore({path!r}): {names} see no checkpoint there, others do\n"
            "all processes need a path on a file system that they share",
            path=path,
            processes=who,
        )

    def _same(self, answers: Mapping[int, bytes]) -> None:
        """Raise unless all processes see the same checkpoint."""
        sides: dict[str, tuple[int, ...]] = {}
        views = {process: json.loads(answers[process]) for process in sorted(answers)}
        if len({(seen["attempt"], seen["index"]) for seen in views.values()}) == 1:
            return  # even if their paths differ
        is_one = len({seen["path"] for seen in views.values()}) == 1
        for process, seen in views.items():
            text = f"step {seen['step']}, attempt {seen['attempt']}, index {seen['index'][:12]}"
            text += "" if is_one else f", at {seen['path']}"
            sides[text] = (*sides.get(text, ()), process)
        path = self._request.store.path
        rows = "\n".join(
            f"  - {text}: {', '.join(map(self._me.name, who))}" for text, who in sides.items()
        )
        raise DivergenceError(
            f"{self._me}: restore({path!r}): processes see different checkpoints there\n"
            f"{rows}\nthe path is not shared, or another save was committed meanwhile",
            sides=sides,
        )

    def _refuse_other_devices(self, opened: Opened, answers: Mapping[int, bytes]) -> None:
        """Raise on all processes if arrays are to be placed on devices outside the group."""
        if self._group.is_all or opened.geometry is None:
            return
        numbers = {json.loads(text)["number"] for text in answers.values()}
        leaves = opened.checkpoint.manifest.leaves
        problems = []
        for leaf_request in opened.requests.all:
            place = leaf_request.place
            others = {*opened.geometry.processes(place)} - numbers if place is not None else ()
            if others:
                detail = f"its layout has devices of {listed(others)}"
                problems.append(
                    f"{leaves[leaf_request.leaf].name}: {detail}, which do not take part"
                )
        path, members = self._request.store.path, listed(self._group.members)
        raise_all(f"restore({path!r}) by {members}", problems)

    def _read(self, opened: Opened, max_host_bytes: int) -> list[Any]:
        checkpoint = opened.checkpoint
        job = Restorer(self._group.place, self._group.count, self._request.merge, _nodes())
        fillings = [
            _filling(checkpoint, leaf_request, opened.strategy.intermediate.get(index), job)
            for index, leaf_request in enumerate(opened.requests.all)
        ]
        num_bytes = sum(want.out.nbytes for filling in fillings for want in filling.wants)
        doing = f"restoring {checkpoint.store.path}"
        try:
            reporter = ProgressReporter(self._client, doing, num_bytes, lane=self._lane)
            with _allowed(opened), reporter as telling:
                values, read_bytes = fill(checkpoint, fillings, max_host_bytes, telling.add)
        except (CorruptCheckpointError, StorageError) as error:
            gone = deleted_meanwhile(checkpoint.store, checkpoint.commit.attempt)
            raise gone or error from None
        _LOG.debug("%s: restore(%r): read %d bytes", self._me, checkpoint.store.path, read_bytes)
        return values

    def _exchange(self, opened: Opened, values: list[Any]) -> None:
        """Move the arrays that were read in file order to their final shardings."""
        if not opened.strategy.intermediate:
            return
        from shoal.checkpoint.restoring.placing import exchanged

        numbers = sorted(opened.strategy.intermediate)
        leaf_requests = [opened.requests.all[index] for index in numbers]
        with _allowed(opened):
            read = [values[index] for index in numbers]
            arrays = exchanged(read, [leaf_request.place for leaf_request in leaf_requests])
        for index, array in zip(numbers, arrays, strict=True):
            values[index] = array


def _filling(
    checkpoint: Checkpoint, leaf_request: LeafRequest, intermediate: Any, job: Restorer
) -> Filling:
    if leaf_request.place is None:
        return on_host(checkpoint, leaf_request, job)
    from shoal.checkpoint.restoring.placing import on_devices

    return on_devices(checkpoint, leaf_request, intermediate)


def _allowed(opened: Opened) -> AbstractContextManager[Any]:
    if opened.geometry is None:
        return nullcontext()
    from shoal.checkpoint.restoring.placing import allowed

    return allowed()


def built(
    request: RestoreRequest, manifest: Manifest, leaf_requests: LeafRequests, values: Sequence[Any]
) -> Any:
    """Return the tree: the target's, or the stored one."""
    structure, nodes = manifest.tree, _nodes()
    if request.form == "flat":
        names = [manifest.leaves[leaf_request.leaf].name for leaf_request in leaf_requests.all]
        return dict(zip(names, values, strict=True))
    if request.form == "dicts":
        structure = tree_nodes.as_dicts(structure)
    if request.rebuild is None:
        return _tree(structure, leaf_requests.all, values, nodes)
    leaves = list(request.given)
    for index, taken in leaf_requests.by_target.items():
        if index not in leaf_requests.below:
            leaves[index] = values[taken[0]]
            continue
        branch = _branch(structure, leaf_requests.below[index])
        chosen = [leaf_requests.all[n] for n in taken]
        leaves[index] = _tree(branch, chosen, [values[n] for n in taken], nodes)
    return request.rebuild(leaves)


def _tree(
    structure: tree_nodes.Structure,
    leaf_requests: Sequence[LeafRequest],
    values: Sequence[Any],
    nodes: Any,
) -> Any:
    """Return the tree of some leaves of a structure, in its order."""
    numbers = [leaf_request.leaf for leaf_request in leaf_requests]
    if len(numbers) < tree_nodes.num_leaves(structure):
        return flatten.unflatten_tree(tree_nodes.prune(structure, numbers), values, nodes)
    leaves: Any = dict(zip(numbers, values, strict=True))  # those of a branch do not begin at 0
    return flatten.unflatten_tree(structure, leaves, nodes)


def _branch(structure: tree_nodes.Structure, name: str) -> tree_nodes.Structure:
    """Return the substructure below a name."""
    for part in [] if name == ROOT else name.split("/"):
        if not isinstance(structure, int):  # not a leaf: there are leaves below this name
            pairs = zip(structure.child_keys(), structure.children, strict=True)
            structure = next(child for key, child in pairs if component(key) == part)
    return structure


def _nodes() -> flatten.Nodes | None:
    """Return the registry of JAX's node types; without JAX, none."""
    if sys.modules.get("jax") is None:
        return None
    from shoal.checkpoint.tree.jax_nodes import JaxNodes

    return JaxNodes()


def _identity(opened: Opened, group: Group) -> bytes:
    """Return which checkpoint this process sees; in a group, also its number in JAX."""
    commit = opened.checkpoint.commit
    seen: dict[str, Any] = {"attempt": commit.attempt, "step": commit.step}
    seen |= {"index": commit.index.sha256, "path": opened.checkpoint.store.path}
    if not group.is_all and opened.geometry is not None:
        from jax import process_index

        seen["number"] = process_index()
    return json.dumps(seen).encode()


def _tried(work: Callable[[], Value]) -> Value | Exception:
    """Return the result, or the error, which is sent to the other processes."""
    try:
        with uncollected():
            return work()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
