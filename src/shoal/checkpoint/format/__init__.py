"""What the files of a checkpoint say. NumPy only, like `plan`."""
