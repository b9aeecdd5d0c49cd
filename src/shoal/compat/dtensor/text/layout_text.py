"""The text form of DTensor layouts, as in TensorFlow, and checks of their specs.

::

    sharding_specs:x,unsharded, mesh:MESH      parted:x, mesh:MESH
    maximal:true, mesh:/job:localhost/replica:0/task:0/device:CPU:0      empty_layout
"""

from __future__ import annotations

from shoal.errors import UsageError

__all__ = ["prefix_of", "split"]

_PREFIXES = {1: "sharding_specs:", 2: "maximal:true,", 3: "parted:"}


def prefix_of(kind: int) -> str:
    """Return the prefix of the text of this kind of layout."""
    return _PREFIXES[kind]


def split(text: str) -> tuple[int, list[str], str]:
    """Return the kind, the specs, and the mesh's text; kind 0 is the empty layout.

    A missing last comma loses no spec here. The mesh's name may contain spaces.

    Raises:
      UsageError: it is not the text of a layout.
    """
    if text == "empty_layout":
        return 0, [], ""
    head, space, mesh = text.partition(" ")
    if not space or not mesh.startswith("mesh:"):
        raise _bad(text, "Expected 2 items, the specs and mesh:…, with a space between them")
    kind = next((kind for kind, prefix in _PREFIXES.items() if head.startswith(prefix)), 0)
    rest = head.removeprefix(_PREFIXES.get(kind, ""))
    if not kind or (kind == 2 and rest):
        known = ", ".join(_PREFIXES.values())
        raise _bad(text, f"Unknown layout type prefix {head[:40]!r}; known: {known}")
    specs = rest.removesuffix(",").split(",") if rest else []
    return kind, [] if specs == ["scalar"] else specs, mesh.removeprefix("mesh:")


def _bad(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return UsageError(f"dtensor.Layout.from_string({shown!r}): {why}")
