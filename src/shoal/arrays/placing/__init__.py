"""Create arrays: put from the host, packed from pieces, initialized sharded.

Knows how arrays move; does not know about per-process values or batches.
"""
