"""JAX's own runtime and coordination service, at arm's length.

The one file that imports `jax._src` and `jaxlib`, the keeper of a host, and the TCP splice through
which processes reach JAX's service, so that its loss ends no process. Does not know what processes
say to each other at the meeting place.
"""
