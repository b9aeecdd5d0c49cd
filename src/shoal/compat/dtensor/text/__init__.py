"""The text forms of devices, meshes and layouts of TensorFlow.

Knows neither JAX nor the classes that are built from them.
"""
