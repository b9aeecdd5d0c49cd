"""Processes: who is here, alive, agreed, leaving.

* What programs call: `process` (initialize, shutdown, who am I), `barrier`.
* How a process becomes a member: `cluster` (its numbers), `membership`, `services` (what process 0
  starts where no launcher did), `exit_guard` (how it ends), `jax_runtime` (the one file that knows
  JAX's private parts).
* Meeting: `coordinator` is the seam; `meeting` and `joining` are the rules, pure state machines;
  `verdicts` puts answers into words; `callsite` and `lanes` say where and in which line one waits.
* Two ways to meet: `coordinator_local` in one process; `coordinator_tcp` (with `hello`, `channel`)
  at the `meeting_place` (with `connections`), which speak in `frames`.
"""
