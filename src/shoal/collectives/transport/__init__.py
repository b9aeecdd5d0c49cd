"""Large values between processes: chunked, through a host's memory or over the devices.

Knows bytes; does not know what they mean.
"""
