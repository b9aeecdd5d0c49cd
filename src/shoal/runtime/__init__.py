"""Processes: who is here, alive, agreed, leaving.

* What programs call: `process` (initialize, shutdown, who am I), `barrier`, `step`, `rollcall`.
* How a process becomes a member: `cluster` (its numbers), `membership`, `services` (what process 0
  starts where no launcher did), `keeping` and `host_keeper` (who watches a host), `splice` and
  `service_link` (JAX's service at arm's length), `spawn`, `accelerators` and `cpu_devices`
  (which there are to be), `jax_runtime` (the one file that knows JAX's private parts).
* How a process stays one, and ends: `watcher` (the thread that speaks for it), `progress` (how far
  it came), `troubles` (who is gone), `stacks`, `ending` (when it hangs), `exit_guard`
  and `main_program` (how it ended), `failure_words` (how that is said).
* Meeting: `coordinator` is the seam, about `points`; `joining`, `meeting` (with `lines`,
  `gathering`, `roster`, `record`, `losses`, `asking`) and `liveness` are the rules, pure state
  machines; `trail` is what calls that send nothing bring there, `trail_search` finds where it
  differs; `answers` and `verdicts` put answers into words; `callsite` says where a call is made,
  `lanes` which calls are under way, and what happens when an exception leaves one; `allowance`
  how long one waits.
* Two ways to meet: `coordinator_local` in one process; `coordinator_tcp` (with `hello`, `channel`,
  `calls`, `arrival_frames`) at the `meeting_place` (with `jobs`, `roles`, `messages`,
  `connections`), which speak in `frames`; `keepalive` lets the kernel tell of dead links.
* `fault_points`: where tests let something happen.
"""
