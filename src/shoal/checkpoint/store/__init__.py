"""Where checkpoints lie: what every store promises, and what is done with any of them.

A *store* is the place of one checkpoint, or of the steps of a run; `interface.Store` lists its
operations, and what each means after a crash. Storage, not messages, decides whether a step is
saved, so a store alone knows how an attempt is begun, committed or ended, atomically and for all:

* `disk.local_store`: a directory.
* `bucket.object_store`: the objects of a bucket below a prefix.

Everything else here works on any store: open a checkpoint, list the steps of a run, delete those
that a policy does not keep. Needs no JAX; knows the format; does not know what kind of storage a
store has.
"""
