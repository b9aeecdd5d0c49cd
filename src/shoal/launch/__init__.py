"""One job on this machine: its processes started, watched, ended and reported.

`keeper` outlives the command line and holds the `job`: `services` and `processes` with their
`environment`, watched by one `loop`, which shows their `output`; `news` is what the meeting place
says; `report` says who failed first; `outliving` and `descendants` find what they left behind. Each
process runs `child`; `log_dir` holds what they wrote.

Knows `plan`, `runtime` and the standard library. Does not know JAX, arrays,
pictures or the command line.
"""
