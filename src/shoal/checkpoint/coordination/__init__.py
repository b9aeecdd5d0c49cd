"""How the processes of one save or restore coordinate: errors, a lead's result, a lease.

Does not know what is saved.
"""
