"""Arrays that begin: put from the host, packed of pieces, born sharded.

Knows how arrays move; does not know about per-process values or batches.
"""
