"""TensorFlow's text forms of devices, meshes and layouts.

Knows neither JAX nor the classes that are built from them.
"""
