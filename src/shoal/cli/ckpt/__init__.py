"""`shoal ckpt`: one module for each command. Needs no JAX.

Knows `checkpoint` and how tables are drawn. Does not know jobs, nor the other commands.
"""
