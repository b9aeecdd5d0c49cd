"""Buckets as programs use them: on moto, a real server of S3's protocol."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import jax
import numpy as np
import pytest
from obstore.store import S3Store

import shoal
from checkpoint.bucket import servers
from shoal import Bucket
from shoal.checkpoint.at import store_at
from shoal.checkpoint.bucket.address import objects_of
from shoal.checkpoint.bucket.object_store import Access, ObjectStore
from shoal.checkpoint.bucket.objects import MemoryObjects
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.step_names import COMMIT
from shoal.errors import StepAlreadyCommittedError, StorageError, UsageError, UsageTypeError
from shoal.paths import local_path
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.store_contract import Save


@pytest.fixture(scope="module")
def server():
    with servers.moto() as address:
        yield address


@pytest.fixture
def bucket(server, request):
    name = request.node.name.lower().replace("_", "-")[:50].split("[")[0].strip("-")
    servers.make_bucket(server, name)
    return f"s3://{name}"


@pytest.fixture
def env(server):
    """The environment of a program that knows nothing of the server but what users export."""
    return {**os.environ, **servers.variables(server), "JAX_PLATFORMS": "cpu"}


def one():
    return LocalJob(1).clients[0]


def test_large_arrays_come_back_on_another_mesh(server, bucket):
    place = store_at(Bucket(f"{bucket}/run", **servers.options(server)), "")
    mesh = shoal.make_mesh({"x": 4, "y": 2})
    big = jax.device_put(
        np.random.default_rng(0).random((3000, 1504)).astype(np.float32),
        shoal.named_sharding(shoal.Layout(mesh, "x", "y")),
    )
    tree = {"big": big, "small": np.arange(5), "n": 3}
    save.on(one(), place, tree)
    other = shoal.make_mesh({"a": 8})
    target = {"big": shoal.Layout(other, None, "a"), "small": None, "n": None}
    del target["small"], target["n"]
    back = restore.on(one(), place, target, only="big")
    assert back["big"].sharding.spec == jax.P(None, "a")
    assert np.asarray(back["big"]).tobytes() == np.asarray(big).tobytes()
    assert restore.on(one(), place)["small"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(StepAlreadyCommittedError, match="nothing is overwritten"):
        save.on(one(), place, tree)


def test_the_path_of_a_step_keeps_the_options(server, bucket, env):
    tree = {"w": np.arange(5), "n": 3}
    http = {"client_options": {"allow_http": True}, **servers.options(server)}
    own = S3Store(bucket.removeprefix("s3://"), prefix="team", **http)
    for run in (
        Bucket(f"{bucket}/run", **servers.options(server)),
        Bucket(f"{bucket}/alone", single_writer=True, **servers.options(server)),
        Bucket(f"{bucket}/run", store=own),
    ):
        with shoal.Checkpoints(run, client=one()) as ckpts:
            ckpts.save(7, tree)
            ckpts.wait()
            place = ckpts.path_of(7)
        assert str(place) == f"{run}/step_000000000007"
        assert shoal.restore(place)["w"].tolist() == [0, 1, 2, 3, 4]
        assert shoal.checkpoint_info(place).step == 7
        assert shoal.plan_restore(place).needed_bytes == 40
        assert store_at(place, "")._access.is_single_writer == ("alone" in run.url)
    command = [sys.executable, "-m", "shoal", "ckpt", "show", str(place)]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "step: 7\n" in shown.stdout, shown.stderr


def test_the_parts_of_an_upload_may_come_in_any_order(server, bucket):
    store = store_at(Bucket(f"{bucket}/run", **servers.options(server)), "")
    data = np.random.default_rng(1).bytes(21 << 20)
    step = 3 << 20
    file = store.open_new("data", len(data))

    def write(begin):
        file.write(memoryview(data)[begin : begin + step], begin)

    offsets = list(range(0, len(data), step))
    threads = [threading.Thread(target=write, args=(begin,)) for begin in reversed(offsets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.write(memoryview(bytes(4096)), len(data))  # padding: nothing of it is kept
    file.finish(len(data))
    assert store.read("data") == data


def test_an_upload_that_is_given_up_leaves_nothing(server, bucket):
    store = store_at(Bucket(f"{bucket}/run", **servers.options(server)), "")
    file = store.open_new("data", 30 << 20)
    file.write(memoryview(bytes(10 << 20)), 0)
    file.discard()
    assert store.names() == []


def test_a_bucket_that_is_not_there(server):
    store = store_at(Bucket("s3://nowhere-at-all/run", **servers.options(server)), "")

    def write():
        file = store.open_new("data", 1 << 20)
        file.write(memoryview(bytes(1 << 20)), 0)  # raises if the answer has come by then
        file.finish(1 << 20)

    with pytest.raises(StorageError, match="cannot write s3://nowhere-at-all/run/data"):
        write()
    with pytest.raises((StorageError, FileNotFoundError)):
        Save("00000000000a").begin(store)


TRAIN = """
import sys
import numpy as np
import shoal

shoal.initialize()
with shoal.Checkpoints(sys.argv[1], keep=2) as ckpts:
    state, first = ckpts.resume(None, {"w": np.zeros(3)})
    for step in range(first, first + 3):
        state = {"w": state["w"] + 1}
        ckpts.save(step, state)
if shoal.process_index() == 0:
    print(first, ckpts.all_steps(), state["w"].tolist())
"""


def test_a_job_of_two_processes_saves_and_resumes_by_a_url(bucket, env, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--only", "0", str(script)]

    def run(*arguments):
        done = subprocess.run(
            [*command, *arguments], env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done
        return done.stdout

    assert run(f"{bucket}/run") == "p0| 0 (1, 2) [3.0, 3.0, 3.0]\n"
    assert run(f"{bucket}/run") == "p0| 3 (4, 5) [6.0, 6.0, 6.0]\n"


def test_doctor_reports_problems_of_a_bucket(env, bucket):
    def doctor(url, *more):
        command = [sys.executable, "-m", "shoal", "doctor", "--json", "--shared", url, *more]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert env["AWS_SECRET_ACCESS_KEY"] not in done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)

    code, found = doctor(f"{bucket}/run")
    assert code == 0
    facts = found["processes"][0]["facts"]["buckets"][f"{bucket}/run"]
    assert facts["rights"] == ["list", "write", "read", "conditions of writes", "delete"]
    code, found = doctor("s3://not-there/run", "-n", "2")
    assert code == 1
    (problem,) = [one for one in found["findings"] if one["check"] == "buckets"]
    assert problem["words"].startswith("cannot list s3://not-there/run: 404 Not Found")
    assert problem["advice"] == "there is no such bucket"


# ---- addresses


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://b/run", "s3://b/run"),
        ("s3://b//run/", "s3://b/run"),
        ("S3://b/x", "s3://b/x"),
        ("s3:/b/x", "s3://b/x"),
        ("abfs://c@acc.dfs.core.windows.net/x", "abfs://c@acc.dfs.core.windows.net/x"),
        ("gs://b/a/b", "gs://b/a/b"),
        (pathlib.Path("s3://b/x"), "s3://b/x"),
    ],
)
def test_addresses(path, url, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    options = {} if url.startswith("s3") else {"skip_signature": True}
    assert Bucket(path, **options).url == url
    assert store_at(Bucket(path, **options), "").step(3).path == f"{url}/step_000000000003"


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("/runs", {}, "does not name a place in a bucket: write s3://bucket/run"),
        ("ftp://b/x", {}, "does not name a place in a bucket"),
        ("s3:///b/x", {}, "does not name a place in a bucket"),
        ("s3://b", {}, "does not name a place in a bucket"),
        ("s3://b/", {}, "names a bucket, and no place in it"),
        ("s3://b/../x", {}, "no folders"),
        ("s3://b/x\ty", {}, "control characters"),
        ("s3://b--x-s3/x", {}, "directory buckets"),
        ("s3://key:pass@b/x", {}, "^an address must not hold credentials: pass them as o"),
        ("s3://key:pass@b", {}, "^an address must not hold credentials: pass them as o"),
        ("s3://key:pa/ss@b/x", {}, "^an address must not hold credentials: pass them as"),
        ("gs:/key@b/x", {}, "^an address must not hold credentials: pass them as options"),
        ("abfss://c:pass@b/x", {}, "^an address must not hold credentials: pass them as"),
        ("az://c/x?sv=1&sig=pass", {}, "^an address must not hold a signature: pass it as"),
        ("az://c?sv=1&sig=pass", {}, "^an address must not hold a signature: pass it as"),
        ("s3://b/x?AWSAccessKeyId=k&Signature=s", {}, "^an address must not hold a sign"),
        (" s3://key:pass@b/x", {}, "^an address must not hold credentials: pass them as"),
        ("s3://key%3Apass%40b/x", {}, "^an address must not hold credentials: pass them"),
        ("https://key:pass@b/x", {}, "^an address must not hold credentials: pass them"),
        ("s3://localhost:9000/b/x", {}, "^Bucket: no name of a bucket has a colon: .*endpoint="),
        ("s3://b/x", {"endpoint": "http://key:pass@h"}, "'s3://b/x'.: an endpoint must not hold"),
        ("s3://b/x", {"acces_key": 1}, "s3://b/x.*acces_key"),
        ("s3://b/x", {"bucket": "c"}, "bucket= is not taken"),
        ("s3://b/x", {"allow_http": True}, "write client_options={'allow_http': …}"),
        ("s3://b/x", {"region": None}, "region=None: leave it out"),
        ("s3://b/x", {"endpoint": "127.0.0.1:9"}, "must begin with http:// or https://"),
        ("s3://b/x", {"endpoint": "https://storage.googleapis.com"}, "write 'gs://b/x'"),
        ("az://c/x", {}, "which storage account"),
        ("abfss://c/x", {}, "which storage account"),
        ("s3://b/x", {"store": object(), "region": "r"}, "not both"),
        ("s3://b/x", {"store": 3}, "store=3 must be an obstore S3Store"),
        ("gs://b/x", {"store": S3Store("b", region="r")}, "must be an obstore GCSStore"),
        ("s3://b/x", {"store": S3Store("other", region="r")}, "is of the bucket 'other'"),
    ],
)
def test_bucket_refuses_invalid_addresses_and_options_at_once(url, options, words, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match=words):
        Bucket(url, **options)
    with pytest.raises(UsageTypeError, match="must be a string"):
        Bucket(3)


ANYWHERE = {
    "save": lambda address: shoal.save(address, {"n": 1}),
    "restore": shoal.restore,
    "plan_restore": shoal.plan_restore,
    "checkpoint_info": shoal.checkpoint_info,
    "Checkpoints": shoal.Checkpoints,
    "Bucket": Bucket,
}


@pytest.mark.parametrize("call", ANYWHERE)
@pytest.mark.parametrize(
    "address",
    [
        "https://account.blob.core.windows.net/c/run?sv=1&sig=not-to-be-shown",
        "s3n://key:not-to-be-shown@bucket/run",
        "hdfs://user:not-to-be-shown@host/run",
        "file://user:not-to-be-shown@host/run",
        "gs://bucket/run?X-Goog-Signature=not-to-be-shown",
        "hf://org/model?token=not-to-be-shown",
        "s3:/key:not-to-be-shown@bucket/run",
        " s3://key:not-to-be-shown@bucket/run",
        "s3n%3A//key:not-to-be-shown@bucket/run",
        pathlib.Path("wasbs://key:not-to-be-shown@bucket/run"),
        b"ftp://user:not-to-be-shown@host/run",
    ],
)
def test_a_secret_in_any_address_is_refused_and_not_shown(call, address, capfd, caplog):
    with pytest.raises(UsageError) as caught:
        ANYWHERE[call](address)
    assert "not-to-be-shown" not in f"{caught.value}{capfd.readouterr()}{caplog.text}"


@pytest.mark.parametrize("command", [["ckpt", "ls"], ["ckpt", "verify"], ["doctor", "--shared"]])
def test_commands_do_not_show_a_secret_either(command):
    command = [sys.executable, "-m", "shoal", *command, "https://h/c/run?sig=not-to-be-shown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert "an address must not hold a signature" in done.stderr
    assert "not-to-be-shown" not in done.stdout + done.stderr


@pytest.mark.parametrize("path", ["file:///a@b/run", "file:/a@b:c/run", "./a:/b@c", "runs/x?sig=1"])
def test_a_path_with_such_characters_is_one(path):
    assert local_path(path).endswith(("/run", "c", "sig=1"))


def test_a_store_with_a_prefix_says_where_it_is():
    own = S3Store("b", prefix="deep/er", region="r")
    assert Bucket("s3://b/run", store=own).url == "s3://b/deep/er/run"


def test_a_variable_with_a_line_break_is_named(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "pass\n")
    with pytest.raises(UsageError, match=r"^the variable AWS_SECRET_ACCESS_KEY begins or ends"):
        Bucket("s3://b/x")


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("run//x", r'"run//"'),
        ("run/./y", r'"run/./"'),
        ("run/../z", r'"run/../"'),
        ("run/a\x01b", r'"run/a\u{1}b"'),
        ("run/step_000000000001//x", '"run/step_000000000001//x"'),
    ],
)
def test_an_object_that_cannot_be_listed_is_named(server, bucket, key, shown):
    client = servers.client(server)
    name = bucket.removeprefix("s3://")
    client.put_object(Bucket=name, Key=key, Body=b"")
    place = Bucket(f"{bucket}/run", **servers.options(server))
    with pytest.raises(StorageError, match=re.escape(f"begins with {shown}, which cannot be")):
        shoal.Checkpoints(place, client=one())
    client.delete_object(Bucket=name, Key=key)
    shoal.Checkpoints(place, client=one()).close()


def test_a_server_that_is_not_there_is_named(monkeypatch):
    quick = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    place = Bucket("s3://b/x", retry_config=quick, **servers.options("http://127.0.0.1:9"))
    with pytest.raises(StorageError, match=r"Connection refused. at http://127.0.0.1:9"):
        shoal.checkpoint_info(place)


def test_a_store_at_a_path(tmp_path):
    store = ObjectStore(MemoryObjects())
    assert store_at(store, "save") is store
    assert isinstance(store_at(tmp_path, "save"), LocalStore)


def test_without_obstore_the_error_names_the_extra(tmp_path):
    (tmp_path / "obstore.py").write_text("raise ModuleNotFoundError('no', name='obstore')")
    program = "import shoal; shoal.Bucket('s3://b/x', access_key_id='a')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.path.dirname(shoal.__path__[0])}"},
    )  # fmt: skip
    assert "s3://b/x: buckets need obstore: pip install 'obstore>=0.12'" in done.stderr


def test_forked_child_that_uses_the_store_raises_usage_error(env, bucket):
    program = f"""
import os, sys, shoal
from shoal.checkpoint.at import store_at
store = store_at("{bucket}/run", "")
store.leave("x")
child = os.fork()
if not child:
    try:
        store.names()
    except shoal.errors.UsageError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(store.names())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert "start it with multiprocessing's `spawn`" in done.stdout, done
    assert done.stdout.endswith("['x']\n"), done


def test_slow_requests_are_logged_once_per_file(monkeypatch, caplog):
    for name, limit in (("_SLOW_S", 0.05), ("_LEAST_S", 0.2), ("_CONNECT_TIMEOUT", timedelta(0))):
        monkeypatch.setattr(f"shoal.checkpoint.bucket.transport.{name}", limit)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        place = Bucket("s3://b/x", endpoint=endpoint, region="r", skip_signature=True)
        objects = objects_of(place).limited(lambda: 0.0)
        with pytest.raises(
            StorageError,
            match=r"cannot read s3://b/x/COMMIT: no answer within .*deadline of the call is over",
        ):
            objects.read("COMMIT")
        file = objects.open_new("data", 64 << 20)
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot write s3://b/x/data: not uploaded"):
                file.finish(64 << 20)
        file.discard()
        silent.settimeout(10)
        for _ in range(2):  # nothing goes on behind the caller's back
            with silent.accept()[0] as connection:
                connection.settimeout(10)
                while connection.recv(1 << 16):
                    pass
    found = [record.getMessage().partition(" takes long")[0] for record in caplog.records]
    assert found == ["s3://b/x/COMMIT: a request (read)", "s3://b/x/data: a request (write)"]


WAITING = """
import sys
from shoal import Bucket
from shoal.checkpoint.bucket.address import objects_of
from shoal.runtime.system.threads import in_threads

place = Bucket("s3://b/x", endpoint=sys.argv[1], region="r", skip_signature=True)
objects = objects_of(place)

def read(names):
    for name in names:
        objects.read(name)

file = objects.open_new("data", 1 << 30) if sys.argv[2] == "write" else None

def write(offsets):
    for offset in offsets:
        file.write(memoryview(bytearray(4 << 20)), offset)
        print(offset, flush=True)

if file is None:
    in_threads(read, "abcd", 4)
else:
    in_threads(write, range(0, 1 << 30, 4 << 20), 4)
"""


@pytest.mark.parametrize("what", ["read", "write"])
def test_interrupt_ends_the_requests_of_all_threads(what):
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as stack:
        silent.settimeout(60)
        command = [sys.executable, "-c", WAITING, f"http://127.0.0.1:{silent.getsockname()[1]}"]
        with subprocess.Popen(
            [*command, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            for _ in range(4 if what == "read" else 1):
                stack.enter_context(silent.accept()[0])
            for _ in range(8 if what == "write" else 0):  # as far as a file may be ahead
                child.stdout.readline()
            for _ in range(25):  # Python hears the first a while later if it is about to wait
                child.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1)
                    break
            else:  # requests are retried for 180 s
                child.kill()
            assert "KeyboardInterrupt" in child.communicate()[1]


# ---- servers that do not keep what they promise


class WithoutConditions(MemoryObjects):
    """A bucket that overwrites what exists."""

    def put_new(self, name, data):
        self.put(name, data)


class WithoutVersions(MemoryObjects):
    """A bucket that overwrites what has changed."""

    def put_over(self, name, data, version):
        self.put(name, data)


@pytest.mark.parametrize(
    ("kind", "what"), [(WithoutConditions, "If-None-Match"), (WithoutVersions, "If-Match")]
)
def test_a_server_that_ignores_conditions_is_refused(kind, what):
    store = ObjectStore(kind())
    with pytest.raises(StorageError, match=f"ignores the conditions of writes .{what}"):
        Save("00000000000a").begin(store)
    assert store.names() == []


@pytest.mark.buckets
def test_a_real_server_that_ignores_conditions_is_refused():
    with servers.nanio() as address:
        servers.make_bucket(address, "lies")
        options = servers.options(address)
        place = Bucket("s3://lies/run", **options)
        words = r"ignores the conditions of writes.*(\n.*)*single_writer=True"
        with pytest.raises(StorageError, match=words):
            save.on(one(), place, {"n": 1})
        ckpts = shoal.Checkpoints(place, asynchronous=False, client=one())
        with pytest.raises(StorageError, match=words):
            ckpts.save(0, {"n": 1})
        ckpts.close()
        said = Bucket("s3://lies/run", single_writer=True, **options)
        with shoal.Checkpoints(said, keep=1, client=one()) as ckpts:
            for step in range(2):
                ckpts.save(step, {"n": step})
        assert ckpts.all_steps() == (1,)
        assert b'"single_writer": true' in store_at(said, "").step(1).read("COMMIT")
        last = Bucket("s3://lies/run/step_000000000001", **options)  # to read, nothing is needed
        assert restore.on(one(), last)["n"] == 1


@pytest.mark.buckets
@pytest.mark.timeout(400)  # beside the other long tests
def test_the_example_is_preempted_and_resumes_on_another_mesh(env, bucket):
    program = pathlib.Path(__file__).parents[3] / "examples" / "preempted.py"
    done = subprocess.run(
        [sys.executable, program, "--checkpoints", f"{bucket}/demo"],
        env=env, capture_output=True, text=True, timeout=390,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert "resumed after epoch" in done.stdout
    *_, undisturbed, preempted = done.stdout.splitlines()
    assert undisturbed.startswith("undisturbed: test accuracy 0.9")
    assert preempted.endswith(undisturbed.removeprefix("undisturbed"))


# ---- deadlines


@pytest.fixture
def silent(monkeypatch):
    """A server that accepts connections and never answers; each request has little time."""
    monkeypatch.setattr("shoal.checkpoint.bucket.transport._LEAST_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        yield Bucket("s3://b/x", **servers.options(f"http://127.0.0.1:{port}"))


def test_a_save_that_has_a_deadline_ends_at_a_server_that_is_silent(silent):
    """By itself obstore would wait for minutes, and pytest would end this."""
    with pytest.raises(StorageError, match=r"no answer within 0|no answer within 1"):
        save.on(one(), silent, {"n": 1}, timeout_s=0.5)


def test_an_upload_ends_at_the_deadline_too(silent, monkeypatch):
    monkeypatch.setattr("shoal.checkpoint.bucket.transport._CONNECT_TIMEOUT", timedelta(seconds=1))
    store = store_at(silent, "").limited(lambda: 0.5)
    file = store.open_new("data", 40 << 20)
    data = memoryview(bytes(4 << 20))

    def write():
        for begin in range(0, 40 << 20, 4 << 20):
            file.write(data, begin)
        file.finish(40 << 20)

    with pytest.raises(StorageError, match="cannot write s3://b/x/data"):
        write()
    file.discard()


# ---- what a review found


def test_register_repair_spares_a_concurrent_commit(monkeypatch):
    objects = MemoryObjects()
    store = ObjectStore(objects)
    objects.put("COMMIT", b"garbage")
    read = store.standing
    other = ObjectStore(objects)

    def late():
        monkeypatch.setattr(store, "standing", read)
        try:
            return read()
        finally:  # another process repairs it, and saves
            assert other.delete_damaged()
            Save("00000000000a").save(other)

    monkeypatch.setattr(store, "standing", late)
    assert store.delete_damaged()
    assert store.committed().attempt == "00000000000a"


def test_remains_of_deleted_steps_are_not_listed():
    root = ObjectStore(MemoryObjects())
    for number in range(40):  # many attempts at one step: a long register
        root.step(1).abandon(f"{number:012x}")
    Save("00000000000a", step=2).save(root.step(2))
    root.step(2).delete("00000000000a")
    own = ObjectStore(root._objects.below("step_000000000003"))  # a root of its own
    Save("00000000000b", step=3).save(own)
    own.delete("00000000000b")
    assert root.steps() == []
    Save("00000000000c", step=4).save(root.step(4))
    assert [step for step, _ in root.steps()] == [4]


def test_step_is_settled_if_it_has_only_the_files_of_its_commit(caplog):
    root = ObjectStore(MemoryObjects())
    for step in range(7):
        Save("00000000000a", step=step).save(root.step(step))
    Save("00000000000b", step=7).begin(root.step(7))
    assert [step for step, _ in root.unsettled()] == [7]
    data = "data-00000000000a-00000-of-00001.safetensors"
    root.step(1).leave("PENDING-00000000000a")  # a crash before the commit was tidied
    root.step(2).leave(data.replace("0a", "0b"))  # of an attempt that ended
    root.step(3).leave("notes.txt")
    root.step(4).delete("00000000000a")
    root.step(4).leave(data)  # a crash while it was deleted
    root.step(5)._objects.put(COMMIT, b"{")
    root.step(6).remove(COMMIT)
    assert [step for step, _ in root.unsettled()] == [1, 2, 3, 4, 5, 6, 7]
    saved_steps.tend(root, idle_s=-1)
    assert [step for step, _ in root.unsettled()] == [3, 5]
    assert "step 5 could not be cleaned up" in caplog.text
    assert [one.step for one in saved_steps.commits(root, skip_corrupt=True)] == [0, 1, 2, 3]


def test_with_a_single_writer_no_end_undoes_a_commit():
    objects = MemoryObjects()
    store = ObjectStore(objects, Access(objects, is_single_writer=True))
    Save("00000000000a").prepare(store)
    with pytest.raises(StorageError, match="the next program that opens this ends the attempt"):
        store.abandon("00000000000a")
    commit = store.commit("00000000000a")
    assert store.abandon("00000000000a") == commit
    # Another program, which does not say so, reads it from the register.
    plain = ObjectStore(WithoutConditions())
    plain._objects._bucket = objects._bucket
    assert plain.pin()
    plain.unpin()
    assert plain.delete("00000000000a")
    assert store.committed() is None


def test_a_save_lists_no_more_the_longer_the_run(monkeypatch):
    listed, real = [], MemoryObjects.listed_below

    def counted(self, *arguments):
        found = real(self, *arguments)
        listed.append(len(found))
        return found

    monkeypatch.setattr(MemoryObjects, "listed_below", counted)
    root, client = ObjectStore(MemoryObjects()), LocalJob(1).clients[0]
    with shoal.Checkpoints(root, keep=2, asynchronous=False, client=client) as ckpts:
        for step in range(10, 50):
            ckpts.save(step, {"w": np.ones(3)})
            most, listed[:] = max(listed), []
        assert most <= 4
        assert ckpts.all_steps() == (48, 49)
        assert listed == [40]
        ckpts.pin(48)
        ckpts.save(7, {"w": np.ones(3)})  # it goes back
        assert ckpts.all_steps() == (7, 48, 49)
        ckpts.save(50, {"w": np.ones(3)})
        assert ckpts.all_steps() == (48, 49, 50)
    with shoal.Checkpoints(root, keep=1, asynchronous=False, client=client) as ckpts:
        ckpts.unpin(48)
        ckpts.save(51, {"w": np.ones(3)})
        assert ckpts.all_steps() == (51,)
