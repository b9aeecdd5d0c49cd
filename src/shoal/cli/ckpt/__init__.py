"""`shoal ckpt`: one file for each command. Needs no JAX.

Knows `checkpoint` and how tables are drawn; no other command knows it.
"""
