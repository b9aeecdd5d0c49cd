"""Who writes and reads which bytes, which steps are kept. NumPy only, like `plan`."""
