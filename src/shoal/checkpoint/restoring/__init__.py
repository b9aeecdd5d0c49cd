"""A restore: what is wanted, which way it comes, and onto which devices.

Knows one committed step and writes nothing. Does not know how it was saved, nor other steps.
"""
