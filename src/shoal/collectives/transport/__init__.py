"""Transports for large values between processes: shared host memory, devices, or a relay.

Knows bytes only; their meaning is above.
"""
