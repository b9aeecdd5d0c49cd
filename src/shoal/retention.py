"""Retention policies for `shoal.Checkpoints(keep=…)`: which steps stay on disk.

`a | b` keeps what either keeps.
"""

from shoal.checkpoint.planning.policies import AnyOf as AnyOf
from shoal.checkpoint.planning.policies import Best as Best
from shoal.checkpoint.planning.policies import EverySeconds as EverySeconds
from shoal.checkpoint.planning.policies import EverySteps as EverySteps
from shoal.checkpoint.planning.policies import Keep as Keep
from shoal.checkpoint.planning.policies import Last as Last
from shoal.checkpoint.planning.policies import LastSeconds as LastSeconds
from shoal.checkpoint.planning.policies import Multiples as Multiples
from shoal.checkpoint.planning.policies import Pinned as Pinned
from shoal.checkpoint.planning.policies import Saved as Saved

__all__ = [
    "AnyOf",
    "Best",
    "EverySeconds",
    "EverySteps",
    "Keep",
    "Last",
    "LastSeconds",
    "Multiples",
    "Pinned",
    "Saved",
]
