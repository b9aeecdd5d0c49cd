"""The text forms of meshes and layouts: tokens, checks, and the notation of meshes.

Knows neither class: both are built from what is parsed here.
"""
