"""The protocol as pure state machines: joining, meeting, liveness, stopping, and the trail.

No socket, no thread, no clock of their own: tests hand them every event and every moment. What
they answer is put into words in `outcomes`.
"""
