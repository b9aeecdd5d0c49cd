"""Large values between processes: chunked, through a host's memory or over the devices.

Knows bytes only; what they mean is above.
"""
