"""The protocol as pure state machines: joining, meeting, liveness, stopping, and the trail.

They know no socket, no thread and no clock: tests hand them every event and every moment. What
they answer is put into words in `outcomes`.
"""
