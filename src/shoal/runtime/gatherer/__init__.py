"""The gatherer of a host, in large jobs: one connection to the meeting place for its processes.

It passes frames on and packs equal ones. It knows neither the rules of meeting nor JAX.
"""
