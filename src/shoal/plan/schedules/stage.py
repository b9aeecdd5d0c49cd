"""One stage of a collective: its load on one kind of link, and its duration."""

from __future__ import annotations

from typing import NamedTuple

# The load of a collective on the links, in all-gathers of the same payload. A
# reduce-scatter is an all-gather played backwards, an all-reduce the one and then the other
# (Rabenseifner), a broadcast a scatter and then an all-gather (van de Geijn): Thakur, Rabenseifner
# and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 2}


class Stage(NamedTuple):
    """Sequential steps, and bytes over the busiest link."""

    steps: int
    link_bytes: float
    seconds: float
    link: str

    def then(self, other: Stage) -> Stage:
        """Combine two stages sequentially; the slower one's link is reported."""
        slower = max(self, other, key=lambda stage: stage.seconds)
        steps, seconds = self.steps + other.steps, self.seconds + other.seconds
        return slower._replace(steps=steps, seconds=seconds)

    def beside(self, other: Stage) -> Stage:
        """Combine two concurrent stages; the slower one is reported."""
        return max(self, other, key=lambda stage: stage.seconds)


NOTHING = Stage(0, 0.0, 0.0, "none")
