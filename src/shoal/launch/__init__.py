"""One job on this machine: its processes started, watched, ended and reported.

Knows `plan` and `runtime`, and the standard library. Draws nothing and parses no command line:
`cli` does.
"""
