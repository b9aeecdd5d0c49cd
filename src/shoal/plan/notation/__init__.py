"""The text forms of meshes and layouts: words, checks, and how a mesh reads.

Knows neither class: both are made of what is read here.
"""
