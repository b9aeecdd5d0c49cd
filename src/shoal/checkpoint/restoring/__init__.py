"""Restore: match the target, choose how to read each leaf, and place it on devices.

Knows one committed step and writes nothing. Does not know how it was saved, nor other steps.
"""
