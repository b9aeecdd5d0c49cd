"""Host values: what they are, their digests, and their lines in the call record.

Knows layouts. Does not know how arrays move between devices.
"""
