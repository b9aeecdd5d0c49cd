"""Retention policies for `shoal.Checkpoints(keep=…)`: which steps stay on disk.

`a | b` keeps what either keeps.
"""

from shoal.checkpoint.retention import AnyOf as AnyOf
from shoal.checkpoint.retention import Best as Best
from shoal.checkpoint.retention import EverySeconds as EverySeconds
from shoal.checkpoint.retention import EverySteps as EverySteps
from shoal.checkpoint.retention import Keep as Keep
from shoal.checkpoint.retention import Last as Last
from shoal.checkpoint.retention import Pinned as Pinned
from shoal.checkpoint.retention import Saved as Saved

__all__ = ["AnyOf", "Best", "EverySeconds", "EverySteps", "Keep", "Last", "Pinned", "Saved"]
