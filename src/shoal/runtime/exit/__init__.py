"""The end of a process: it always ends, and the other processes learn how.

Knows the client and the rules. Does not know how a process joined, nor JAX's service.
"""
