"""The processes of a job: membership, liveness, agreement, exit.

The modules here hold the functions that programs call: `process` (initialize, shutdown,
process_index), `barrier`, `step`, `job_status`, `preemption`, `agreement`; and `clouds`, which
users import by name. Each directory knows only those below it:

* `doctor`: why a job does not start.
* `startup`: how a process becomes a member of its job. `exit`: how it ends, in every case.
* `jax_service`: isolation from JAX's runtime and coordination service.
* `client`: how a process speaks to the coordinator. `server`: the coordinator itself.
* `notices`: sources of preemption notices.
* `rules`: the protocol, as pure state machines. `wire`: bytes. `system`: this machine.

Does not know arrays, values or checkpoints. JAX is imported only in `jax_service/jax_runtime.py`,
and there only inside functions.
"""
