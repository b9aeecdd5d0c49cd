"""The command `shoal`."""
