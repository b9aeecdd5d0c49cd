"""Host values: what they are, their digests, and the trail that they leave.

Knows layouts; starts no program and moves nothing between devices.
"""
