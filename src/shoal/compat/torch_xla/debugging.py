"""The API of torch_xla's sharding visualisation."""

from __future__ import annotations

from typing import Any

from shoal.colour import local
from shoal.compat.torch_xla.errors import stands_for
from shoal.compat.torch_xla.sharded import unwrap_sharded_tensor
from shoal.draw.describe import describe
from shoal.plan.hlo_reading import layout_of_text

__all__ = ["visualize_sharding", "visualize_tensor_sharding"]


@local
@stands_for("shoal.describe")
def visualize_sharding(
    sharding: str,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> str:
    """Print which devices hold which block of an array, of any rank (`shoal.describe`).

    Local.

    Args:
      sharding: HLO text, with devices listed or as an iota: `{devices=[2,2]<=[4]}`.
      use_color, scale, min_width, max_width: ignored; blocks are as wide as their content.
    Returns:
      the printed text.

    Raises:
      UsageError: the text is not the sharding of one array.

    >>> picture = visualize_sharding("{devices=[2,1]0,1}")
    [2, 1] as Layout(dim0, - @ dim0=2 dim1=1)
    ┌─────────────────────────────────┬─────┐
    │ dim 0 (dim0) ↓  dim 1 (whole) → │ 0:1 │
    ├─────────────────────────────────┼─────┤
    │ 0:1                             │  0  │
    ├─────────────────────────────────┼─────┤
    │ 1:2                             │  1  │
    └─────────────────────────────────┴─────┘
    each block on 1 device
    """
    picture = describe(layout_of_text(sharding))
    print(picture)
    return picture


@local
@stands_for("shoal.describe")
def visualize_tensor_sharding(t: Any, **kwargs: Any) -> str:
    """Print which devices hold which block of an array (`shoal.describe`).

    Local.

    Args:
      t: the array, or a view.
      kwargs: as for `visualize_sharding`.
    Returns:
      the printed text.
    """
    picture = describe(unwrap_sharded_tensor(t))
    print(picture)
    return picture
