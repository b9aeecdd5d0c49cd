"""Pictures of meshes, layouts and arrays, and of a job that runs.

`mesh` and `layout` say what is to be seen as a `picture`; `terminal` draws it; `describe` is what
programs call. `roll` is the table of a job's processes; `amounts` are bytes and seconds as text.
"""
