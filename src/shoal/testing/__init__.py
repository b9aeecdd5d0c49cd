"""Tools for testing programs that run in many processes.

Shipped to users: knows everything but the command line, and nothing of shoal knows it.
"""
