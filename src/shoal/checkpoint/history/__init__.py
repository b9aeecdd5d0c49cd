"""The steps of a run: saved during training, kept by a policy, resumed.

Knows everything below it in `checkpoint`; nothing there knows that steps follow each other.
"""
