"""Processes: who is here, alive, agreed, leaving."""
