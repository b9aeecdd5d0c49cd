"""Retention policies for `shoal.Checkpoints(keep=…)`: which steps stay on disk.

`a | b` keeps what either keeps.
"""

from shoal.checkpoint.policies import AnyOf as AnyOf
from shoal.checkpoint.policies import Best as Best
from shoal.checkpoint.policies import EverySeconds as EverySeconds
from shoal.checkpoint.policies import EverySteps as EverySteps
from shoal.checkpoint.policies import Keep as Keep
from shoal.checkpoint.policies import Last as Last
from shoal.checkpoint.policies import Pinned as Pinned
from shoal.checkpoint.policies import Saved as Saved

__all__ = ["AnyOf", "Best", "EverySeconds", "EverySteps", "Keep", "Last", "Pinned", "Saved"]
