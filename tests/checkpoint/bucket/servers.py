"""Real servers of buckets, on the loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

PATIENCE_S = 60
KEYS = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Start moto; yield its address. Parts of uploads may be small."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with started(command, f"http://127.0.0.1:{port}") as address:
        yield address


@contextlib.contextmanager
def started(command: list[str], address: str) -> Iterator[str]:
    """Start a server, and wait until it answers."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1"}
    with subprocess.Popen(command, env=env, **quiet) as server:
        try:
            limit = time.monotonic() + PATIENCE_S
            while not answers(address):
                assert server.poll() is None, f"{command} ended with {server.returncode}"
                assert time.monotonic() < limit, f"{command} does not answer"
                time.sleep(0.05)
            yield address
        finally:
            server.kill()


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def make_bucket(address: str, name: str) -> None:
    request = urllib.request.Request(f"{address}/{name}", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()


def variables(address: str) -> dict[str, str]:
    """Return what users export for such a server."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "not-to-be-shown",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }


def options(address: str) -> dict:
    """Return the options of a Bucket on such a server."""
    return {**KEYS, "endpoint": address}
