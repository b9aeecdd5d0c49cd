"""Values between processes; one operation, one file.

* `live`: who is alive, agreed by all of them.
"""
