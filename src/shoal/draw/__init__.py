"""Pictures of meshes, layouts and arrays.

`mesh` and `layout` say what is to be seen as a `picture`; `terminal` draws it; `describe` is what
programs call.
"""
