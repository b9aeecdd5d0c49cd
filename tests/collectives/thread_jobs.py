"""N processes that are threads of the test."""

import threading

PATIENCE_S = 60.0  # reached only when something is broken


def run_all(job, function):
    """Call `function(client)` in a thread for each process; return results and errors."""
    results = [None] * len(job.clients)

    def run(index):
        try:
            results[index] = function(job.clients[index])
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "somebody hangs"
    return results
