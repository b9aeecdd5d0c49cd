"""What the processes of a save or restore say to each other: errors, one lead's answer, a lease.

Does not know what is saved.
"""
