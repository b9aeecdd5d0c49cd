"""The device orders of other libraries, bit by bit, for jobs that must go on as they began.

Knows the hardware; knows no mesh.
"""
