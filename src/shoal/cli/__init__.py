"""The command `shoal`: typer and rich, one file for each command.

`main` is the table of commands. `run` checks a command line and hands it to `shoal.launch`;
`watch` and `stacks` look at a job that runs, which their `observer` finds; `mesh`, `layout` and
`plan` draw; `ckpt` looks at checkpoints.

Starts, computes and stores nothing itself: the floors below do. Never imports JAX.
"""
