"""A save, phase by phase: what all say, write and wait for."""
