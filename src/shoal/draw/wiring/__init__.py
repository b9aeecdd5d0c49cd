"""Scenes: a topology and a mesh placed on it, rendered in each medium.

Knows `plan` and the media; knows no arrays.
"""
