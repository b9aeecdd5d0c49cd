"""Parse parameters with layouts from the command line, and size their shards."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.cli.layout import halves, item_bytes, read_shape
from shoal.errors import UsageError, raise_all
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

_FORMS = '{"w": {"shape": [8, 4], "dtype": "bfloat16", "layout": "data, model"}}, also nested'


class Param(NamedTuple):
    """One array and its layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    layout: Layout

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def bytes_per_device(self) -> int:
        """Bytes of its largest shard."""
        return math.prod(self.layout.shard_shape(self.shape)) * self.item_bytes

    @property
    def copies(self) -> int:
        """The number of devices that hold each shard."""
        return math.prod(self.layout.mesh.axes[axis] for axis in self.layout.unused_axes)

    @property
    def uneven(self) -> list[str]:
        """Messages about dims that their shards do not divide."""
        found = []
        for dim, size in enumerate(self.shape):
            if size % (count := self.layout.num_shards(dim)):
                axes = "+".join(self.layout.axes_of_dims[dim])
                found.append(f"dim {dim} of {size} does not divide into {count} shards ({axes})")
        return found


def read_params(source: str, texts: Sequence[str], mesh: Mesh) -> list[Param]:
    """Parse parameters from a JSON file (or "-", the standard input) and from texts.

    Raises:
      UsageError: all problems, by name.
    """
    rows = [*(_from_file(source) if source else ()), *map(_from_text, texts)]
    plain = Mesh(dict(mesh.axes))  # its text is short, whatever the order of the devices
    problems: list[str] = []
    found = []
    for name, shape, dtype, layout in rows:
        try:
            found.append(_param(name, shape, dtype, layout, plain))
        except UsageError as error:
            problems.append(f"{name}: {error}")
    names = [param.name for param in found]
    problems += [f"{name} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    raise_all("plan", problems)
    return found


def _param(name: str, shape: Any, dtype: Any, text: Any, mesh: Mesh) -> Param:
    if isinstance(shape, str):
        sizes = read_shape("" if shape == "()" else shape, "the shape")
    elif isinstance(shape, list) and all(type(size) is int for size in shape):
        sizes = tuple(shape)
    else:
        raise UsageError(f"the shape {shape!r} must be a list of integers")
    if not isinstance(dtype, str) or not isinstance(text, str | None):
        raise UsageError(f"dtype {dtype!r} and layout {text!r} must be strings")
    if text is None or not text.strip():
        layout = Layout.replicated(mesh, len(sizes))
    else:
        layout = Layout.parse(f"{halves(text)[0]} @ {mesh.text}")
    layout.check_shape(sizes)
    return Param(name, sizes, dtype, item_bytes(dtype, "the dtype"), layout)


def _from_text(text: str) -> tuple[str, Any, Any, Any]:
    """Parse `NAME: SHAPE DTYPE LAYOUT`; without a layout the parameter is replicated."""
    name, colon, rest = text.partition(":")
    words = rest.split(None, 2)
    if not colon or len(words) < 2:
        raise UsageError(
            f"plan: {text!r} must be 'NAME: SHAPE DTYPE LAYOUT', such as 'w: 1024x512 bfloat16 "
            "data, -'"
        )
    return name.strip(), words[0], words[1], words[2] if len(words) > 2 else None


def _from_file(source: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Parse a JSON tree of parameters, or the output of `shoal ckpt show --json`."""
    try:
        if source == "-":
            tree = json.loads(sys.stdin.read())
        else:
            with open(source, encoding="utf-8") as file:
                tree = json.load(file)
    except OSError as error:
        raise UsageError(f"--params {source}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--params {source} is not JSON: {error}") from None
    if not isinstance(tree, Mapping):
        raise UsageError(f"--params {source}: must be an object of parameters, such as {_FORMS}")
    leaves = tree.get("leaves")
    if isinstance(leaves, list) and all(isinstance(row, Mapping) for row in leaves):
        rows = [row for row in leaves if row.get("dtype")]  # of a checkpoint: only arrays
        return iter(
            [(str(r.get("name")), r.get("shape"), r["dtype"], r.get("layout")) for r in rows]
        )
    return _walk(tree, "", source)


def _walk(tree: Mapping[str, Any], path: str, source: str) -> Iterator[tuple[str, Any, Any, Any]]:
    for key, value in tree.items():
        name = f"{path}/{key}" if path else key
        if not isinstance(value, Mapping):
            raise UsageError(f"--params {source}: {name} is {value!r}, not a parameter: {_FORMS}")
        if not isinstance(value.get("shape"), list):
            yield from _walk(value, name, source)
            continue
        known = ("shape", "dtype", "layout")
        if unknown := [word for word in value if word not in known]:
            raise UsageError(
                f"--params {source}: {name} has {unknown[0]!r}, which is not one of "
                f"{', '.join(known)}"
            )
        yield name, value["shape"], value.get("dtype", "float32"), value.get("layout")
