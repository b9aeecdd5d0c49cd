"""The coordinator: the server at which the processes of a job meet.

Applies `rules` to the frames received by `wire`. Knows neither JAX nor the client.
"""
