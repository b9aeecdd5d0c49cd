"""Pictures of cells, and the media that show them: terminal and SVG.

Knows nothing of meshes, layouts or hardware.
"""
