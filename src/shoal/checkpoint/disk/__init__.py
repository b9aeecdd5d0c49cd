"""A directory as a store: its files during a save, and after a crash. Needs no JAX.

::

    begin   PENDING-<attempt>, manifest        an attempt lives as long as its PENDING is there
    part    part-<attempt>-00003               process 3 has written all of its data
    commit  index, PENDING → link → COMMIT     atomic: from here on the step is saved
            (rename, where it replaces another)
    tidy    PENDING and parts are removed

Everything here depends on the directory alone, not on other processes. Any process may do any of
it, concurrently and repeatedly. This is safe because:

* PENDING is linked, never copied: a process that removed it knows that the attempt is not
  committed, or finds that it is. All processes that commit write the same bytes.
* PENDING is the first file of an attempt, and attempt ids are never reused: files of an attempt
  without PENDING and without COMMIT are garbage for ever.
* COMMIT is replaced by renaming PENDING over it: there is one at every moment, and a process that
  removed PENDING knows as much as above. The files of the replaced attempt go afterwards. They are
  then files without PENDING and without COMMIT.
* COMMIT is deleted by renaming, so that what was renamed can be read afterwards: if it belonged
  to another attempt by then, it is renamed back, and counts as COMMIT until it is.

Knows the format and which process writes what; does not know how processes communicate.
"""
