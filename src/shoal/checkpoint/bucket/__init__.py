"""Objects as a store: what has names, versions and conditional writes, but no links or renames.

::

    begin   PENDING-<attempt>, manifest        an attempt; PENDING is its lease
    part    part-<attempt>-00003               process 3 has written all of its data
    commit  index, then COMMIT                 from here on the step is saved
    tidy    PENDING and parts are removed

One object decides over a step: COMMIT, the *register* of what is committed, which attempts are
ended, and whether the step is pinned. It is changed only if it is still what was read, and never
removed, so of any number of processes that commit, end, delete or pin, each sees what the others
did. What is overwritten, and a damaged step that is saved again, is replaced by one such change,
which commits the new attempt and ends the old one. Whether a write succeeded is always decided by
reading: "exists already" may mean our own write whose answer was lost, and a time-out may mean
anything. Data have names that contain the attempt, so they need no conditions, and go only after
the register says so.

Does not know HTTP, nor how processes communicate.
"""
