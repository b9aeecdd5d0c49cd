"""Preemption: why this program must stop, and what it does about it.

`shoal.preempted(step)` says when to stop: at one step, on every process. Here is the rest: sources
of notices (`watch`, and `clouds` for it), the pending notice, how to continue after all, how to
say that the state is saved, and the exit code that asks the scheduler for another start.
"""

from shoal.runtime import clouds as clouds
from shoal.runtime.preemption import clear as clear
from shoal.runtime.preemption import exit_code as exit_code
from shoal.runtime.preemption import mark_saved as mark_saved
from shoal.runtime.preemption import notice as notice
from shoal.runtime.preemption import watch as watch
from shoal.runtime.rules.stopping import Notice as Notice

__all__ = ["Notice", "clear", "clouds", "exit_code", "mark_saved", "notice", "watch"]
