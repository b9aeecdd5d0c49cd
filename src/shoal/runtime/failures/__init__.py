"""What is known of a failure, and how it is shown.

Knows values and texts alone: no process, no file, no stream. Does not know where the facts come
from, nor where a report is printed.
"""
