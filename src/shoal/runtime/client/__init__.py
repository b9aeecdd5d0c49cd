"""The client of the coordinator, in each process of the job.

`interface` is what the public functions call; `over_tcp` and `in_process` implement it. Does not
know how the job was started, nor the server: both sides share only `rules` and `wire`.
"""
