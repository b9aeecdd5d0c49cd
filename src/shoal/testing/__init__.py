"""Tools for testing programs that run in many processes.

Shipped to users. May use everything but the command line; nothing in shoal uses it.
"""
