"""Memory to files and back, block by block, each hashed and verified. Works without JAX."""
