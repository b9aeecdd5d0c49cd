"""Save, phase by phase: what all processes agree on, write and wait for.

Knows one step; does not know which steps there are, nor which are kept.
"""
