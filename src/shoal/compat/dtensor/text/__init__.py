"""The text of devices, meshes and layouts, as TensorFlow writes and reads it.

Knows neither JAX nor the classes that are made of it.
"""
