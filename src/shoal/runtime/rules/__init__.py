"""The protocol as pure state machines: joining, meeting, liveness, stopping, and call records.

They know no socket, no thread and no clock: tests supply every event and every point in time.
They answer with values: `client.outcomes` turns these into exceptions.
"""
