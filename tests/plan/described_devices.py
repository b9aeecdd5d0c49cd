"""Devices as JAX lists them, for tests that have none: plain mappings."""

from __future__ import annotations

import itertools
import types


def generated(x, y, z, kind, one_device_per_chip=True, num_slices=1, reorder=False):
    """List the devices of TPU slices as `jax.devices()` does: by process, then z, y, x, core."""
    cores = 1 if one_device_per_chip else 2
    tile = (min(x, 2), min(y, 2), 1)
    nx, ny, nz = (size // own for size, own in zip((x, y, z), tile, strict=True))
    ranges = [range(n) for n in (num_slices, nz, ny, nx, tile[2], tile[1], tile[0], cores)]
    rows = []
    for part, zp, yp, xp, zd, yd, xd, core in itertools.product(*ranges):
        at = (xd + tile[0] * xp, yd + tile[1] * yp, zd + tile[2] * zp)
        chip = at[0] + x * (at[1] + y * (at[2] + z * part))
        process = xp + nx * (yp + ny * (zp + nz * part))
        rows.append(row(core + cores * chip, process, at, core, part, "tpu", kind))
    return rows[::-1] if reorder else rows


def row(number, process, coords, core, part, platform, kind):
    """Return what is known of one device."""
    return {
        "id": number, "process": process, "coords": coords, "core": core, "slice": part,
        "platform": platform, "kind": kind,
    }  # fmt: skip


def as_jax(rows):
    """Return the same devices with the attributes that JAX's have."""
    devices = []
    for row in rows:
        names = {"id": row["id"], "process_index": row["process"], "platform": row["platform"],
                 "device_kind": row["kind"]}  # fmt: skip
        for ours, theirs in (
            ("coords", "coords"),
            ("core", "core_on_chip"),
            ("slice", "slice_index"),
        ):
            if row[ours] is not None:
                names[theirs] = row[ours]
        devices.append(types.SimpleNamespace(**names))
    return devices
