"""The command `shoal`.

* `main`: the table of commands. `mesh` and `layout` draw; `run` launches.
* A launch: `run` checks the command line; `keeper` outlives it, and holds the `job`: `services` and
  `processes` with their `environment`, watched by one `loop`, which shows their `output`; `report`
  says who failed first; `descendants` finds what they left behind. Each process runs `child`.
* A look at a job that runs: `watch` and `stacks`; their `observer` finds it and asks.
"""
