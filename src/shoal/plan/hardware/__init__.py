"""Hardware: how chips are wired, link speeds, and which devices belong to which host.

Knows no mesh and no layout.
"""
