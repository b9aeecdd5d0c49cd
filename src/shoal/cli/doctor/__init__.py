"""`shoal doctor`: the command, what it prints, and the job of `-n`.

Knows the checks of `runtime.doctor`, which print nothing. Does not know the other commands.
"""
