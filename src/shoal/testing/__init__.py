"""Tools for testing programs that run in many processes.

Shipped to users. Uses the whole library except the command line, which it does not know; nothing in
shoal uses it.
"""
