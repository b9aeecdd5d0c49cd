"""Check that all values are finite on every process, or show where the first one is not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.arrays.host.host_values import native
from shoal.collectives.arguments import deadline_of, meet_callers
from shoal.collectives.device_shards import (
    DeviceShard,
    is_on_host,
    layout_text,
    on_each,
    shards_here,
)
from shoal.collectives.leaves import Array, LeafSpec, require_values
from shoal.collectives.wire import flatten
from shoal.colour import collective
from shoal.errors import NonFiniteError, counted
from shoal.runtime.agreement import Call
from shoal.runtime.client.group import group_in
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.failures.comparison import shown_line
from shoal.runtime.jax_service.own_programs import own_programs
from shoal.runtime.rules.spec_lines import with_layouts
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.local_devices import num_cores
from shoal.runtime.system.threads import in_threads
from shoal.runtime.uses_client import uses_client

_BLOCK_BYTES = 1 << 20  # with its masks, it stays in a core's cache
_THREADS = 4  # enough to nearly saturate memory bandwidth
_MOST_LEAVES = 8  # that a message names


@collective("processes")
@uses_client
@collective_scope("check_finite")
def check_finite(
    client: JobClient,
    tree: Any,
    *,
    processes: Iterable[int] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> None:
    """Check that no process holds a NaN or an infinity; else raise on all of them.

    Collective over processes.

    The call either returns on all processes or raises on all, except on one that the answer could
    not reach. The error names the first leaf with such a value, in the order of the tree, and the
    first place in it, with its process and device.

    Each process checks the shards of its own devices, so no data move, and no program runs over
    several processes. On accelerators the devices reduce them, in one program for each shape of a
    shard; in host memory NumPy does, in blocks of 1 MiB. One round trip carries nothing else than
    that all is well. Pending computations of the values are awaited first, without a deadline.

    Integers, bools, strings, PRNG keys and floats without such values, such as float4_e2m1fn, are
    always finite. Trees, shapes, dtypes and layouts are compared; values are not.

    Args:
      tree: arrays of NumPy and JAX of any dtype, sharded in any way; other leaves as for
        `assert_same`.
      processes: the processes that make the call, including the caller; equal on all. The shards of
        others are not checked. None: all of the job.
      name: identifies the call if it is made at several call sites; None: the call site identifies
        it.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the lane; see `barrier`.

    Raises:
      NonFiniteError: on all that arrived: a value is not finite.
      DivergenceError: on all that arrived: trees, shapes, dtypes, layouts or the calls differ.
      DeadlineError: on all that arrived: a process did not arrive in time.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong, a leaf cannot be checked (all such are
        named by path), or it is called inside `jit`, `grad`, `vmap` or `shard_map` and accelerators
        hold values. The others get PeerFailedError.

    >>> import numpy as np
    >>> check_finite({"w": np.zeros(3), "step": 7}, name="gradients")
    """
    deadline = deadline_of("check_finite", name, timeout_s, lane)
    group = group_in(client, "check_finite", processes)
    spec, values = flatten(tree, "check_finite")
    require_values("check_finite", spec.leaves, values)
    layouts = [layout_text(leaf, value) for leaf, value in zip(spec.leaves, values, strict=True)]
    with jax.transfer_guard("allow"), own_programs():
        parts = [_parts(leaf, value) for leaf, value in zip(spec.leaves, values, strict=True)]
        bad = _bad_parts(parts)
        brought = _found(bad, [*map(bool, layouts)], client.progress.step) if bad else b""
    call = Call("check_finite", name, callsite(), with_layouts(spec.lines, layouts))
    answers = meet_callers(client, call, brought, deadline, lane, group)
    if any(answers.values()):
        findings = {process: json.loads(text) for process, text in answers.items() if text}
        raise _error(ThisProcess(client.process, client.hosts), call, spec.leaves, findings)


class _Searched(NamedTuple):
    """A value of the host, or a shard of a device."""

    region: int
    starts: tuple[int, ...]  # the place of its first item in the leaf
    device: int | None  # its id; None: the value is not on a device
    holders: int  # devices that hold the same region, this one included
    value: Any  # NumPy array, or an array on one device

    @property
    def is_reduced(self) -> bool:
        """Does its device search it?"""
        return isinstance(self.value, DeviceShard) and not is_on_host(self.value.data)

    def read(self) -> Array:
        """Return it on the host."""
        return self.value.read() if isinstance(self.value, DeviceShard) else self.value


def _parts(leaf: LeafSpec, value: Any) -> list[_Searched]:
    """Return the parts of a leaf that may hold a value that is not finite."""
    if leaf.kind in ("float", "complex"):
        return [_Searched(region=0, starts=(), device=None, holders=1, value=np.asarray(value))]
    if leaf.dtype is None or leaf.kind == "key" or not _has_non_finite(leaf.dtype):
        return []
    if not isinstance(value, jax.Array):
        return [
            _Searched(
                region=0,
                starts=(0,) * np.ndim(value),
                device=None,
                holders=1,
                value=np.asarray(value),
            )
        ]
    return [
        _Searched(
            shard.region,
            starts=tuple(first for first, _ in shard.box),
            device=shard.device,
            holders=len(shard.holders),
            value=shard,
        )
        for shard in shards_here(leaf, value)
        if shard.data.size
    ]


@lru_cache(maxsize=64)
def _has_non_finite(dtype: np.dtype[Any]) -> bool:
    """Has a dtype values that are not finite?"""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return False
    return dtype.itemsize > 1 or _narrow(dtype) is not None


@lru_cache(maxsize=64)
def _narrow(dtype: np.dtype[Any]) -> tuple[Any, Any] | None:
    """Return (mask, bits) of a float of one or two bytes: x & mask == bits if x is not finite.

    None: all of its values are finite.
    """
    word = np.dtype(f"u{dtype.itemsize}")
    bit_patterns = np.arange(1 << 8 * dtype.itemsize, dtype=word)
    with np.errstate(invalid="ignore"):
        bad = bit_patterns[~np.isfinite(bit_patterns.view(dtype).astype(np.float32))]
    if not bad.size:
        return None
    bits, differ = np.bitwise_and.reduce(bad), np.bitwise_or.reduce(bad)
    mask = ~(bits ^ differ)  # the bits in which all of them agree
    return mask, bits


# ---- The search: on the devices, or in blocks on the host.


def _bad_parts(parts: Sequence[Sequence[_Searched]]) -> dict[int, list[_Searched]]:
    """Return the parts that are not finite, by the number of their leaf."""
    started = [
        on_each(_is_bad, [part.value.data for part in of_leaf if part.is_reduced])
        for of_leaf in parts
    ]
    bad: dict[int, list[_Searched]] = {}
    for index, of_leaf in enumerate(parts):  # NumPy works while the devices do
        bad_here = [
            part for part in of_leaf if not part.is_reduced and _is_bad_on_host(part.read())
        ]
        bad |= {index: bad_here} if bad_here else {}
    for index, (of_leaf, results) in enumerate(zip(parts, started, strict=True)):
        reduced = [part for part in of_leaf if part.is_reduced]
        for part, result in zip(reduced, results, strict=True):
            if np.asarray(result).any():
                bad.setdefault(index, []).append(part)
    return bad


def _is_bad(x: jax.Array) -> jax.Array:
    """Traced: is a value of the array not finite?"""
    x = x.astype(jnp.float32) if x.dtype.itemsize == 1 else x
    return ~jnp.all(jnp.isfinite(x))


def _is_bad_on_host(array: Array) -> bool:
    flat = _flat(array)
    step = max(1, _BLOCK_BYTES // flat.itemsize)
    bad_starts: list[int] = []

    def blocks(share: Iterator[int]) -> None:
        for start in share:
            if _bad(flat[start : start + step]).any():
                bad_starts.append(start)
                return

    starts = range(0, flat.size, step)
    if len(starts) > 4 * _THREADS:
        in_threads(blocks, starts, min(_THREADS, num_cores()))
    else:
        blocks(iter(starts))
    return bool(bad_starts)


def _flat(array: Array) -> Array:
    """Return the numbers of an array in C order; those of a complex one as pairs."""
    flat = np.ascontiguousarray(native(array)).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _bad(block: Array) -> Array:
    """Return which numbers of a block are not finite."""
    pattern = _narrow(block.dtype) if block.itemsize < 4 else None
    if pattern is None:
        return ~np.isfinite(block)
    mask, bits = pattern  # NumPy converts such floats slowly
    return np.asarray((block.view(mask.dtype) & mask) == bits)


# ---- What is known of the first leaf.


def _found(
    bad: Mapping[int, Sequence[_Searched]], are_global: Sequence[bool], step: int | None
) -> bytes:
    """Return what this process found in its first leaf, as JSON."""
    leaf = min(bad)
    rows = [_row(part) for part in bad[leaf]]
    finding = {"leaf": leaf, "leaves": sorted(bad)[: _MOST_LEAVES + 2], "step": step, "parts": rows}
    return json.dumps(finding | {"global": are_global[leaf]}).encode()


def _row(part: _Searched) -> dict[str, Any]:
    """Describe the values of a part that are not finite."""
    array = part.read()
    flat, first = _flat(array), -1
    per_item = flat.size // array.size
    step = max(1, _BLOCK_BYTES // flat.itemsize) * per_item
    counts = {"nan": 0, "inf": 0, "-inf": 0}
    shown = ""
    for start in range(0, flat.size, step):
        block = flat[start : start + step]
        items = _bad(block).reshape(-1, per_item).any(1)
        if not items.any():
            continue
        with np.errstate(invalid="ignore"):  # NaNs of other bits than NumPy's
            wide = block.reshape(-1, per_item)[items].astype(np.float64)
        is_nan = np.isnan(wide).any(1)
        is_below = ~is_nan & ~(wide == np.inf).any(1)
        for kind, these in (("nan", is_nan), ("-inf", is_below), ("inf", ~is_nan & ~is_below)):
            counts[kind] += int(these.sum())
        if first < 0:
            first = start // per_item + int(items.argmax())
            shown = str(np.asarray(array).reshape(-1)[first]) if array.size else ""
    place = np.unravel_index(first, array.shape) if array.ndim else ()
    return {
        "region": part.region,
        "device": part.device,
        "holders": part.holders,
        "index": [begin + int(i) for begin, i in zip(part.starts, place, strict=True)],
        "value": shown,
        "counts": counts,
    }


def _error(
    me: ThisProcess,
    call: Call,
    leaves: Sequence[LeafSpec],
    findings: Mapping[int, Mapping[str, Any]],
) -> NonFiniteError:
    """Return the error; the same on all processes, but for its first words."""
    leaf_index = min(finding["leaf"] for finding in findings.values())
    of_leaf = {
        process: finding for process, finding in findings.items() if finding["leaf"] == leaf_index
    }
    # Not global: each process has a value of its own.
    if not all(finding["global"] for finding in of_leaf.values()):
        first_process = min(of_leaf)
        of_leaf = {first_process: of_leaf[first_process]}
    rows = [
        (row["index"], process, row)
        for process, finding in of_leaf.items()
        for row in finding["parts"]
    ]
    index, process, first = min(rows, key=lambda row: (row[0], row[1], row[2]["device"] or 0))
    counts = {"nan": 0, "inf": 0, "-inf": 0}
    for region in {row["region"] for _, _, row in rows}:  # replicas count once
        held = [row["counts"] for _, _, row in rows if row["region"] == region]
        most = max(held, key=lambda tally: sum(tally.values()))
        counts = {kind: counts[kind] + most[kind] for kind in counts}
    leaf, step = leaves[leaf_index], of_leaf[process]["step"]
    item = int(np.ravel_multi_index(index, leaf.shape)) if index else 0
    place = leaf.place_of(item)
    device = first["device"]
    where = me.name(process) if device is None else f"device {device} of {me.name(process)}"
    same = sum(row["region"] == first["region"] for _, _, row in rows)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    size = int(np.prod(leaf.shape, dtype=np.int64))
    label = f"check_finite {call.name!r}" if call.name else "check_finite"
    lines = [
        f"{me}: {label}: {place} is {first['value']} on {where}"
        + (f", in step {step}" if step is not None else ""),
        f"  {shown_line(leaf.line)}: {kinds} in {counted(size, 'value')}"
        + (f"; on {same} of {first['holders']} replicas" if first["holders"] > 1 else ""),
    ]
    also = sorted({n for finding in findings.values() for n in finding["leaves"]} - {leaf_index})
    if also:
        shown = ", ".join(leaves[n].path for n in also[:_MOST_LEAVES])
        more = " and others" if len(also) > _MOST_LEAVES else ""
        lines.append(f"  also not finite: {shown}{more}.")
    return NonFiniteError(
        "\n".join(lines),
        path=leaf.path, index=index, value=first["value"], process=process, device=device,
        counts=counts, step=step, also=[leaves[n].path for n in also],
    )  # fmt: skip
