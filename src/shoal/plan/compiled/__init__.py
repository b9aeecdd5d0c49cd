"""Compiled programs, parsed from the text of their HLO: instructions, loops, traffic.

Knows text only: neither JAX nor meshes.
"""
