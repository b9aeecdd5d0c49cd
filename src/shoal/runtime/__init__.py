"""Processes: who is here, alive, agreed, leaving.

The files here are the verbs that programs call: `process` (initialize, shutdown, who am I),
`barrier`, `step`, `rollcall`, `preemption`, `agreement`; and `clouds`, which users import by name.
Each folder knows only those below it:

* `startup`: how a process becomes a member of its job. `exit`: however it ends, it ends.
* `jax_service`: JAX's own runtime and service, at arm's length.
* `client`: a process's end of the meeting place. `server`: the meeting place itself.
* `notices`: who says that this process must stop.
* `rules`: the protocol, as pure state machines. `wire`: bytes. `system`: this machine.

Never imports JAX but in `jax_service/jax_runtime.py`, and there inside functions only.
"""
