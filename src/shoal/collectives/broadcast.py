"""Broadcast one process's values to all."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.arguments import check_flags
from shoal.collectives import wire
from shoal.collectives.arguments import deadline_of, meet_callers, process_of
from shoal.collectives.leaves import Buffer, is_global
from shoal.collectives.transport import stream
from shoal.collectives.wire import inline_bytes
from shoal.colour import collective
from shoal.errors import raise_all
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import group_in
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.failures.comparison import ShownSide, divergence_error
from shoal.runtime.failures.process_text import listed
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import uses_client

_INLINE, _LARGE = b"i", b"l"
_SIZE = struct.Struct("<Q")


@collective("processes")
@uses_client
@collective_scope("broadcast")
def broadcast(
    client: JobClient,
    tree: Any,
    source: int = 0,
    *,
    is_source: bool | None = None,
    processes: Iterable[int] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> Any:
    """Return the values of process `source` on every one of `processes`.

    Collective over processes.

    No two processes ever receive different bits: -0.0, subnormals, NaN payloads and 64-bit values
    arrive unchanged, whatever JAX's configuration. Values from one call are never delivered to
    another: tree, shapes, dtypes, `source` and the call site are compared before anything is
    delivered.

    Up to 64 KiB are sent in the same round trip, or in two if a process passes None, and nothing is
    compiled. Larger values are sent through memory that the processes of one host share. Between
    hosts they are sent in chunks over one device of each process or, among a subset of the job,
    through the coordinator. Memory: the result, and a few chunks of 4 MiB.

    Args:
      tree: arrays of NumPy and JAX of any dtype (also of ml_dtypes), PRNG keys, NumPy and Python
        scalars of any size, str, bytes, None. Only the values of `source` matter. On the other
        processes, None in place of the tree stands for any tree of dicts, lists and tuples:
        `broadcast(load() if process_index() == 0 else None)`. In another tree there,
        `jax.ShapeDtypeStruct`s may stand for arrays, and str and bytes may have any length.
      source: the process that has the values, one of `processes`; equal on all.
      is_source: instead of `source`, passed on all: True on the one process that has the values,
        False on the others.
      processes: the processes that make the call, including the caller; equal on all. None: all of
        the job.
      name: identifies the call if it is made at several call sites; None: the call site identifies
        it.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the lane; see `barrier`. In lanes other than "main", large values are sent through the
        coordinator, which is slower.

    Returns:
      The tree, with arrays as new NumPy arrays (they may share one block of memory), keys as keys
      on the default device, all other leaves unchanged. The same with one process.

    Raises:
      DivergenceError: on all that arrived: trees, shapes, dtypes, `source` or the calls differ,
        except for None; no process, or several, have `is_source`.
      DeadlineError: on all that arrived: a process did not arrive in time.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong, a leaf has an unsupported type (all
        such are named by path), or a process passes None and the tree has other nodes than dicts,
        lists and tuples. The others get PeerFailedError.

    >>> import numpy as np
    >>> broadcast({"seed": 1 << 70, "run": "a", "w": np.float32([1, -0.0])})
    {'run': 'a', 'seed': 1180591620717411303424, 'w': array([ 1., -0.], dtype=float32)}
    """
    deadline = deadline_of("broadcast", name, timeout_s, lane)
    group = group_in(client, "broadcast", processes)
    if is_source is None:
        source = process_of(
            operation="broadcast",
            argument="source",
            value=source,
            group=group,
            num_processes=client.num_processes,
        )
        has_values = source == client.process
        given = f"source={source}"
    else:
        check_flags("broadcast", is_source=is_source)
        has_values = is_source
        given = "is_source"
    spec, values = wire.flatten(tree, "broadcast")
    _refuse_parts(spec, values)
    buffers: list[Buffer] = []
    payload = spec.digest
    if has_values:
        buffers, num_bytes = wire.pack_tree(spec, values, "broadcast")
        if num_bytes <= inline_bytes(group.count):
            payload += _INLINE + b"".join(buffers)
        else:
            payload += _LARGE + _SIZE.pack(num_bytes)
    call = Call("broadcast", name, callsite(), (given,))
    answers = meet_callers(client, call, payload, deadline, lane, group)
    if is_source is not None:
        source = _source_of(client, call, answers)

    def again(lines: Iterable[str], payload: bytes = b"") -> bytes:
        further = call._replace(spec=(given, *lines))
        met = agree(
            client, further, payload, timeout_s=deadline.left_s, group=group.named, lane=lane
        )
        return met[source]

    spec = _tree_of_source(answers, client.process, source, spec, again)
    payload = answers[source][wire.DIGEST_BYTES :]
    if payload[:1] == _INLINE:
        data = np.frombuffer(bytearray(memoryview(payload)[1:]), np.uint8)
    else:
        (num_bytes,) = _SIZE.unpack_from(payload, 1)
        data = np.empty(num_bytes, np.uint8)
        stream.broadcast_bytes(
            client, source, buffers, num_bytes, into=[data],
            timeout_s=deadline.left_s, lane=lane, name=name or "broadcast", group=group.named,
        )  # fmt: skip
    return wire.unpack_tree(spec, data)


def _tree_of_source(
    answers: Mapping[int, bytes],
    process: int,
    source: int,
    spec: wire.Spec,
    again: Callable[..., bytes],
) -> wire.Spec:
    """Return the tree of the source, which this process has too, or for which it gave None.

    Args:
      answers: the digest of each process's tree, and more of the source.
      spec: this process's own tree.
      again: meets the others once more; returns the payload of the source.

    Raises:
      DivergenceError: on all: a process has another tree.
      UsageError: on the source: its tree cannot be described to those that gave None.
    """
    digests = {p: brought[: wire.DIGEST_BYTES] for p, brought in answers.items()}
    nothing = wire.spec_of(None).digest
    without = [p for p, digest in digests.items() if digest == nothing != digests[source]]
    if without:
        text = b""
        if process == source:
            text = _described(spec, without).encode()
        text = again(["the tree of the source"], text)
        if process in without:
            spec = wire.spec_from(text)
    if any(digests[p] != digests[source] for p in digests if p not in without):
        again(spec.lines)
    return spec


def _described(spec: wire.Spec, without: Sequence[int]) -> str:
    text, problems = wire.spec_text(spec)
    if problems:
        raise_all(
            f"broadcast: {listed(without)} gave None, which stands for any tree of dicts, lists "
            "and tuples; on them, pass a tree of the same structure (jax.ShapeDtypeStructs may "
            "stand for arrays)",
            problems,
        )
    return text


def _source_of(client: JobClient, call: Call, answers: Mapping[int, bytes]) -> int:
    """Return the one process that supplied values; the same on all processes."""
    sources = [p for p, brought in answers.items() if len(brought) > wire.DIGEST_BYTES]
    if len(sources) == 1:
        return sources[0]
    others = [process for process in answers if process not in sources]
    sides = {"is_source=True": sources, "is_source=False": others}
    detail = "several processes are the source" if sources else "no process is the source"
    here = ShownSide((), call="broadcast", name=call.name or "", site=call.site)
    raise divergence_error(
        f"{ThisProcess(client.process, client.hosts)}: broadcast: {detail}",
        [here._replace(processes=who, said=claim) for claim, who in sides.items() if who],
        advice="Pass is_source=True on exactly one process.",
    )


def _refuse_parts(spec: wire.Spec, values: list[Any]) -> None:
    """Reject, on every process alike, arrays that no process holds whole."""
    detail = "is distributed over several processes; allgather it, or relayout it to be replicated"
    problems = [
        f"{leaf.path}: {detail}"
        for leaf, value in zip(spec.leaves, values, strict=True)
        if is_global(value) and not value.is_fully_replicated
    ]
    raise_all("broadcast", problems)
