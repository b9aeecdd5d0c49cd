"""Pictures of meshes, layouts and arrays, made from the same data."""
