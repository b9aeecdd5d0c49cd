"""Bytes between processes: frames, and the sockets at both ends.

Knows lengths, headers and deadlines; does not know what a frame means.
"""
