"""Isolation from JAX's runtime and coordination service.

The one module that imports `jax._src` and `jaxlib`, the host agent, and the TCP proxy through which
processes reach JAX's service, so that its loss ends no process. Does not know what processes send
to the coordinator.
"""
