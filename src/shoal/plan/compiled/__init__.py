"""Compiled programs, parsed from the text of their HLO: instructions, loops, traffic.

Knows text; knows neither JAX nor meshes.
"""
