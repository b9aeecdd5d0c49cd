"""A topology, and a mesh placed on it, as a scene; and that scene in each medium.

Knows `plan` and the media; knows no arrays.
"""
