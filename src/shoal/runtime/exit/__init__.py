"""However a process ends, it ends, and the others hear how.

Knows the client and the rules. Does not know how a process joined, nor JAX's service.
"""
