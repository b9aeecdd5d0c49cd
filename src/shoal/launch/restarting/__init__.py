"""The attempts of a job: `attempts` runs them one after the other, by the rules of `restarts`.

Knows `launch` and what is below it. Does not know on how many hosts an attempt runs, nor the
command line.
"""
