"""A process's end of the meeting place.

`interface` is what the verbs call; `over_tcp` and `in_process` carry it out. Does not know who
started the job, nor the server: both sides share `rules` and `wire` only.
"""
