"""Start plain Python processes, without shoal, and print how each one ends.

    python alone.py N PROGRAM [SECONDS]

Each process gets three arguments: the address of process 0, N, and its own index. Only the last
line of its output is shown. If no process prints anything or ends for SECONDS (20), the processes
that are left are killed.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time


def main(count, program, patience_s=20):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    outputs = [tempfile.TemporaryFile("w+") for _ in range(count)]  # noqa: SIM115
    env = {**os.environ, "JAX_TRACEBACK_FILTERING": "off"}  # the last line is then the error
    processes = [
        subprocess.Popen(
            [sys.executable, program, address, str(count), str(index)],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for index, output in enumerate(outputs)
    ]
    started = moved = time.monotonic()
    before, ends, silent = None, {}, f"still running, silent for {patience_s:g} s"
    while len(ends) < count and time.monotonic() - moved < patience_s:
        for index, process in enumerate(processes):
            if index not in ends and process.poll() is not None:
                seconds = time.monotonic() - started
                ends[index] = f"exit code {process.returncode} after {seconds:.1f} s"
        now = [len(ends), *(os.fstat(output.fileno()).st_size for output in outputs)]
        if now != before:
            before, moved = now, time.monotonic()
        time.sleep(0.05)
    for index, output in enumerate(outputs):
        print(f"process {index}: {ends.get(index, silent)}")
        print(last_line(output), end="")
    for process in processes:
        process.kill()


def last_line(output):
    output.seek(0)
    lines = [line for line in output if line.strip() and not line.startswith("[Gloo]")]
    return f"    {lines[-1]}" if lines else ""


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))
