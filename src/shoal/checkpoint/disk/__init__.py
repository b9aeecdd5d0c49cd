"""Files: what is there at each moment of a save, and after a crash. Works without JAX.

::

    begin   PENDING-<attempt>, manifest        an attempt lives as long as its PENDING is there
    part    part-<attempt>-00003               process 3 has written all of its data
    commit  index, PENDING → link → COMMIT     the one moment from which on the step is saved
    tidy    PENDING and parts go

Everything here is a pure function of a folder; nobody asks other processes. Any process may do
any of it, at the same time as others, as often as it likes. What makes that safe:

* PENDING is linked, never copied: who removed it knows that this attempt is not committed, or
  finds that it is. Whoever commits writes the same bytes.
* PENDING is the first file of an attempt, and the id of an attempt is never used again: files of
  an attempt without PENDING and without COMMIT are garbage for ever.
* COMMIT is renamed to be deleted, so that what was renamed can be read afterwards: if in the
  meantime it was another attempt's, it is given back, and counts as COMMIT until it is.

Knows the format, and who writes what; does not know what the processes of a job say to each other.
"""
