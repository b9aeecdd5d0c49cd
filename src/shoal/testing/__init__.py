"""Tools for testing programs that run in many processes."""
