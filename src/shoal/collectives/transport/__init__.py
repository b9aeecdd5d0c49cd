"""Transports for large values between processes: shared host memory, devices, or a relay.

Knows bytes; knows nothing of their meaning.
"""
