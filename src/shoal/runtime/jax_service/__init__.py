"""Isolation from JAX's runtime and coordination service.

The one module that imports `jax._src` and `jaxlib`, the keeper of a host, and the TCP splice
through which processes reach JAX's service, so that its loss ends no process. Does not know what
processes send to the meeting place.
"""
