"""Human-readable bytes and seconds."""

from __future__ import annotations


def in_bytes(count: float) -> str:
    """Format bytes in binary units.

    >>> in_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def in_seconds(seconds: float) -> str:
    """Format a duration in a suitable unit.

    >>> [in_seconds(s) for s in (0.0121, 4.0, 75.2, 240.0, 9000.0)]
    ['12.1 ms', '4.0 s', '75 s', '4 min', '2.5 h']
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    if seconds < 60.0:
        return f"{seconds:.1f} s"
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200.0 else f"{seconds / 3600:.1f} h"
