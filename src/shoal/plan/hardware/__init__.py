"""What hardware is like: how chips are wired, how fast their links are, who lies on which host.

Knows no mesh and no layout.
"""
