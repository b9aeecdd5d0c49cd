"""What to do about a failure, where that follows from the facts."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import CorruptCheckpointError
from shoal.runtime.failures.comparison import needs
from shoal.runtime.failures.facts import Cause
from shoal.runtime.system.failure_words import listed


def advice_of(causes: Sequence[Cause]) -> tuple[str, ...]:
    """Return sentences of advice about causes, the first one first; none if nothing follows."""
    (first, *_) = causes or (None,)
    if first is None:
        return ()
    of = listed(first.processes)
    is_slow = f"If {of} {'is' if len(first.processes) == 1 else 'are'} only slow, raise timeout_s"
    if first.kind == "not_joined":
        by = "shoal.initialize or jax.distributed.initialize"
        return (f"Every process must call {by}. {is_slow}.",) if first.wait else ()
    if first.kind == "deadline":
        return (f"{is_slow} of this call, or SHOAL_TIMEOUT_S where it has none.",)
    if first.kind == "stalled":
        limit = "--stalled-after or SHOAL_STALLED_AFTER_S"
        return (f"The limit is that of {limit}.",)
    if first.kind == "checkpoint" and first.exit_code == CorruptCheckpointError.exit_code:
        return ("No value of it was returned. Restore another step, or put back a good copy.",)
    if (found := first.difference) is not None:
        return tuple(
            needs(found.call, found.what, is_silent=found.found_at is not None).splitlines()
        )
    return ()
