"""The launchers of a job on several hosts: they start it together, and end it together.

`leader` is the launcher of node 0, which runs the services at ports that all hosts know; `follower`
is that of any other node; `peer` is what they have in common. `joining` holds the rules by which
they come together, `messages` what they send to each other.

Knows `launch` and what is below it. Does not know how processes are started and watched, nor the
command line.
"""
