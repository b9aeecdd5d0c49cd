"""Compiled programs, read from the text of their HLO: instructions, loops, traffic.

Knows text only: neither JAX nor meshes.
"""
