"""Launch one job on this machine: start, watch, end and report its processes.

`keeper` outlives the command line and runs the attempts of a job (`restarting`), of which each is a
`job`: `services` and `processes` with their `environment`, watched by one `loop`, which shows their
`output`; `news` are the events reported by the meeting place; `report` finds the first failure;
`outliving` and `descendants` find processes left behind. Each process runs `child`; `log_dir` holds
its output. `crew` is what a job needs of its launchers: this one alone, or those of several hosts
(`nodes`).

Knows `plan`, `runtime` and the standard library. Does not know JAX, arrays,
pictures or the command line.
"""
