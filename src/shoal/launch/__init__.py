"""Launch one job on this machine: start, watch, end and report its processes.

`supervisor` outlives the command line and runs the attempts of a job (`restarts`). Each is a `job`:
`services` and `processes` with their `environment`, watched by one `loop`, which shows their
`output`. `news` are the events reported by the coordinator; `conclusion` and `diagnose` find the
first failure; `processes` finds those left behind. Each process runs `child`; `log_dir` holds its
output. `launchers` is what a job needs of its launchers: this one alone, or those of several hosts
(`nodes`).

Knows `plan`, `runtime` and the standard library. Does not know JAX, arrays,
pictures or the command line.
"""
