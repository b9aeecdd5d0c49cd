"""Real servers of buckets, on the loopback."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from checkpoint.bucket import gcs_stub

PATIENCE_S = 60
KEYS = {"access_key_id": "key", "secret_access_key": "not-to-be-shown", "region": "us-east-1"}


# moto 5.2.5 looks whether an object exists, and writes it later: of 150 races of 8 creators, 13 had
# several winners. One request at a time, its conditions hold.
MOTO = """
import io, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

app, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

def one_at_a_time(environ, start_response):
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    environ["wsgi.input_terminated"] = True
    with turn:
        return list(app(environ, start_response))

run_simple("127.0.0.1", int(sys.argv[1]), one_at_a_time, threaded=True)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Start moto; yield its address. Parts of uploads may be small."""
    port = free_port()
    command = [sys.executable, "-c", MOTO, str(port)]
    with started(command, f"http://127.0.0.1:{port}") as address:
        yield address


@contextlib.contextmanager
def started(command: list[str], address: str) -> Iterator[str]:
    """Start a server, and wait until it answers."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    keys = {
        "NANIO_ACCESS_KEY": KEYS["access_key_id"],
        "NANIO_SECRET_KEY": KEYS["secret_access_key"],
    }
    env = {**os.environ, **keys, "S3_UPLOAD_PART_MIN_SIZE": "1"}
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


def client(address: str) -> Any:
    """Return boto3's client of such a server."""
    return boto3.client(
        "s3", endpoint_url=address, region_name=KEYS["region"],
        aws_access_key_id=KEYS["access_key_id"], aws_secret_access_key=KEYS["secret_access_key"],
    )  # fmt: skip


def make_bucket(address: str, name: str) -> None:
    client(address).create_bucket(Bucket=name)


def variables(address: str) -> dict[str, str]:
    """Return what users export for such a server."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": KEYS["secret_access_key"],
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }


def options(address: str) -> dict:
    """Return the options of a Bucket on such a server."""
    return {**KEYS, "endpoint": address}


# ---- What `make test-buckets` installs; Azurite where it is (npm install azurite).


def program(name: str) -> str:
    """Return the path of a program, beside this Python or on the path; skip the test without it."""
    there = shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)
    if there is None:
        pytest.skip(f"there is no {name}")
    return there


@contextlib.contextmanager
def seaweedfs() -> Iterator[str]:
    """Start SeaweedFS with its door for S3; yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {"accessKey": KEYS["access_key_id"], "secretKey": KEYS["secret_access_key"]}
        own = {
            "name": "tests",
            "credentials": [keys],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        config = os.path.join(folder, "s3.json")
        with open(config, "w", encoding="utf-8") as file:
            json.dump({"identities": [own]}, file)
        ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        grpc = {name: free_port() for name in ports}
        command = [program("weed"), "-logdir", folder, "server", "-ip=127.0.0.1",
                   "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3", f"-s3.config={config}",
                   "-volume.max=500", "-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0",
                   "-s3.port.lance=0", "-master.telemetry=false"]  # fmt: skip
        command += [f"-{name}.port={port}" for name, port in ports.items()]
        command += [f"-{name}.port.grpc={port}" for name, port in grpc.items()]
        with started(command, f"http://127.0.0.1:{ports['s3']}") as address:
            yield address


def azurite() -> contextlib.AbstractContextManager[str]:
    """Start Azurite; yield its address."""
    quiet = "--silent --skipApiVersionCheck"
    place = "--location {folder} --blobHost 127.0.0.1 --blobPort {port}"
    return in_a_folder("azurite-blob", f"{quiet} {place}")


def nanio() -> contextlib.AbstractContextManager[str]:
    """Start nanio, which ignores the conditions of writes; yield its address."""
    return in_a_folder("nanio", "serve --data-dir {folder} --host 127.0.0.1 --port {port}")


@contextlib.contextmanager
def in_a_folder(name: str, options: str) -> Iterator[str]:
    """Start a server whose data are in a new folder; yield its address."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [program(name), *options.format(folder=folder, port=port).split()]
        with started(command, f"http://127.0.0.1:{port}") as address:
            yield address


SERVERS = {
    "moto": moto, "GCS stub": gcs_stub.gcs, "SeaweedFS": seaweedfs, "Azurite": azurite,
    "nanio": nanio,
}  # fmt: skip

# The account that every emulator of Azure has, and publishes.
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def azure_options(address: str) -> dict:
    """Return the options of a Bucket on Azurite."""
    return {
        "account_name": _ACCOUNT,
        "account_key": _ACCOUNT_KEY,
        "endpoint": f"{address}/{_ACCOUNT}",
    }


def make_container(address: str, name: str) -> None:
    """Make a container of Azurite, by a request signed as the service documents it."""
    date, version = email.utils.formatdate(usegmt=True), "2021-12-02"
    path = f"/{_ACCOUNT}/{name}"
    signed = "\n".join(
        ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}", f"/{_ACCOUNT}{path}",
         "restype:container"]
    )  # fmt: skip
    key = base64.b64decode(_ACCOUNT_KEY)
    signature = base64.b64encode(hmac.digest(key, signed.encode(), "sha256")).decode()
    request = urllib.request.Request(
        f"{address}{path}?restype=container", method="PUT", data=b"",
        headers={"x-ms-date": date, "x-ms-version": version, "content-type": "",
                 "Authorization": f"SharedKey {_ACCOUNT}:{signature}"},
    )  # fmt: skip
    urllib.request.urlopen(request, timeout=30).close()
