"""The launchers of a job on several hosts: they start it together, and end it together.

`leader` is the launcher of node 0, which runs the services at `ports` that all hosts know;
`follower` is that of any other node, connected by `joining_leader`. `assembly` holds the rules of
their joining, `messages` what they send to each other, `program` what must be equal on all of them;
`choosing` decides between them and a launcher alone.

Knows `launch` and what is below it. Does not know how processes are started and watched, nor the
command line.
"""
