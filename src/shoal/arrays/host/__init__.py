"""Host values: what they are, their digests, and the trail that they leave.

Knows layouts. Does not know how arrays move between devices.
"""
