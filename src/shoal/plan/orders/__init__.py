"""The device orders of other libraries, bit by bit, for jobs that must keep theirs.

Knows the hardware; knows no mesh.
"""
