"""The command `shoal`: typer and rich, one module for each command.

`main` is the table of commands. `run` checks a command line and passes it to `shoal.launch`;
`watch` and `stacks` observe a running job, which their `observer` finds; `mesh`, `layout` and
`plan` draw; `ckpt` inspects checkpoints.

Starts, computes and stores nothing itself: the floors below do. Never imports JAX.
"""
