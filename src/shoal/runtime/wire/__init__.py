"""Bytes between processes: frames, and the sockets at both ends.

Knows lengths, headers and deadlines; knows nothing of what a frame means.
"""
