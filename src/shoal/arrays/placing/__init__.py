"""Create arrays: put from the host, packed from pieces, initialised sharded.

Knows how arrays move; does not know about per-process values or batches.
"""
