"""A restore: what is wanted, which way it comes, and onto which devices.

Knows one committed step; writes nothing.
"""
