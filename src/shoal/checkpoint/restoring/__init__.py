"""Restore: match the target, choose how to read each leaf, and place it on devices.

Knows one committed step; writes nothing.
"""
