"""Where credentials are found, and that they are never shown."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

import shoal
from checkpoint.bucket import servers
from shoal.checkpoint.bucket.address import objects_of
from shoal.checkpoint.bucket.credentials import _CLOUDS, credentials
from shoal.checkpoint.bucket.providers import AZURE, BY_SCHEME, GCS, S3
from shoal.errors import StorageError, UsageError

CLOUDS = ("AWS_", "GOOGLE_", "AZURE_")


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """A user without any credentials."""
    for name in [name for name in os.environ if name.startswith(CLOUDS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # boto3 would wait for it


@pytest.mark.parametrize(
    ("scheme", "options", "variables", "source"),
    [
        ("s3", {"access_key_id": "k"}, {}, "the option access_key_id="),
        ("s3", {"AWS_ACCESS_KEY_ID": "k"}, {}, "the option AWS_ACCESS_KEY_ID="),
        ("s3", {}, {"AWS_ACCESS_KEY_ID": "k"}, "the variable AWS_ACCESS_KEY_ID"),
        (
            "s3",
            {},
            {"AWS_WEB_IDENTITY_TOKEN_FILE": "f"},
            "the variable AWS_WEB_IDENTITY_TOKEN_FILE",
        ),
        ("s3", {"region": "r"}, {}, "the metadata service of this host"),
        ("gs", {"skip_signature": True}, {}, "the option skip_signature="),
        ("gs", {}, {"GOOGLE_SERVICE_ACCOUNT": "f"}, "the variable GOOGLE_SERVICE_ACCOUNT"),
        ("gs", {}, {}, "the metadata service of this host"),
        ("az", {"account_key": "k"}, {}, "the option account_key="),
        ("abfs", {}, {"AZURE_STORAGE_SAS_KEY": "k"}, "the variable AZURE_STORAGE_SAS_KEY"),
    ],
)
def test_credentials_are_left_to_obstore_where_it_finds_them(
    scheme, options, variables, source, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = credentials(BY_SCHEME[scheme], options)
    assert found.provider is None
    assert found.source == source


@pytest.mark.parametrize("kind", ["service_account", "authorized_user"])
def test_files_of_google_that_obstore_reads(kind, tmp_path, monkeypatch):
    path = tmp_path / "key.json"
    path.write_text(json.dumps({"type": kind}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    assert credentials(GCS, {})[:3] == (None, {}, "GOOGLE_APPLICATION_CREDENTIALS")


def test_a_profile_is_read_by_boto3(tmp_path):
    """A whole save, by a program that knows only the name of a profile."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[work]\naws_access_key_id = {servers.KEYS['access_key_id']}\n"
        f"aws_secret_access_key = {servers.KEYS['secret_access_key']}\n"
    )
    (tmp_path / ".aws/config").write_text("[profile work]\nregion = eu-central-1\n")
    program = (
        "import shoal; place = shoal.Bucket('s3://profile/x'); shoal.save(place, {'n': 1}); "
        "print(place.credentials, shoal.restore(place), place._stores[0].config['region'])"
    )
    with servers.moto() as address:
        servers.make_bucket(address, "profile")
        env = {**os.environ, "AWS_PROFILE": "work", "AWS_ENDPOINT_URL": address}
        done = subprocess.run(
            [sys.executable, "-c", program], env={**env, "JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.stdout == "boto3 (shared-credentials-file) {'n': 1} eu-central-1\n", done


@pytest.mark.parametrize(
    ("credentials_file", "config_file", "profile", "words"),
    [
        ("", "", "gone", "gone"),
        ("", "[profile p]\ncredential_process = false", "p", "custom-process"),
        ("", "[profile p]\nrole_arn = r\nsource_profile = lost", "p", "lost"),
        ("[default]\naws_access_key_id = k", "", None, "aws_secret_access_key"),
        ("no section", "", None, "parse"),
        ("", "[profile p\n", "p", "parse"),
    ],
)
def test_invalid_boto3_setting_raises_with_the_reason(
    credentials_file, config_file, profile, words, tmp_path, monkeypatch
):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(credentials_file)
    (tmp_path / ".aws/config").write_text(config_file)
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(UsageError, match=f"^boto3 cannot use the settings of this user.*{words}"):
        credentials(S3, {})


@pytest.mark.parametrize("config_file", ["", "[default]\nregion = r", None])
def test_files_without_keys_leave_it_to_the_host(config_file, tmp_path):
    if config_file is not None:
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws/config").write_text(config_file)
    assert credentials(S3, {}).source == "the metadata service of this host"


def write_keys(tmp_path, key):
    (tmp_path / ".aws").mkdir(exist_ok=True)
    (tmp_path / ".aws/new").write_text(
        f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n"
    )
    os.replace(tmp_path / ".aws/new", tmp_path / ".aws/credentials")


class OneKey(http.server.BaseHTTPRequestHandler):
    """A server that takes one key, which may be replaced when it has refused another."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        there = self.server
        is_right = f"Credential={there.key}/" in self.headers.get("Authorization", "")
        there.asked += 1
        if not is_right:
            there.refused()
        body = b"data" if is_right else b"<Error><Code>ExpiredToken</Code></Error>"
        self.send_response(200 if is_right else 403)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", '"1"')
        self.send_header("last-modified", "Sat, 01 Jan 2000 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def of_one_key(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneKey)
    server.daemon_threads, server.asked, server.refused = True, 0, lambda: None
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_keys_that_are_rewritten_are_read_again(of_one_key, tmp_path):
    write_keys(tmp_path, "first")
    of_one_key.key = "first"
    objects = objects_of(shoal.Bucket("s3://bucket/run"))
    assert objects.read("x")[0] == b"data"
    write_keys(tmp_path, "second")
    of_one_key.key = "second"
    assert objects.read("x")[0] == b"data"
    of_one_key.key = "third"  # they come while the request with the old ones is refused
    of_one_key.refused = lambda: write_keys(tmp_path, "third")
    assert objects.read("x")[0] == b"data"
    of_one_key.key, of_one_key.asked, of_one_key.refused = "fourth", 0, lambda: None
    with pytest.raises(StorageError, match=r"ExpiredToken.*\n.*boto3 .shared-credentials-file"):
        objects.read("x")
    assert of_one_key.asked == 1


def test_a_file_that_is_half_written_does_not_lose_the_keys(of_one_key, tmp_path):
    write_keys(tmp_path, "first")
    of_one_key.key = "first"
    objects = objects_of(shoal.Bucket("s3://bucket/run"))
    (tmp_path / ".aws/credentials").write_text("[default]\naws_acc")
    assert objects.read("x")[0] == b"data"
    write_keys(tmp_path, "second")
    of_one_key.key = "second"
    assert objects.read("x")[0] == b"data"


def test_without_the_library_it_is_named(monkeypatch):
    for name in ("obstore.auth.boto3", "obstore.auth.azure"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it could not be imported
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert credentials(S3, {}).source == (
        "the metadata service of this host; AWS_PROFILE is set, and profiles and SSO are found "
        "with boto3 installed"
    )
    assert credentials(AZURE, {}).source == (
        "the metadata service of this host; `az login` and managed identities by name are found "
        "with azure-identity installed"
    )


def test_every_provider_has_its_credentials_and_its_store():
    import obstore.store

    assert {*BY_SCHEME.values()} == {*_CLOUDS}
    assert all(hasattr(obstore.store, provider.store) for provider in _CLOUDS)


VARIABLES = [(provider, variable) for provider in _CLOUDS for variable in provider.endpoints]


@pytest.mark.parametrize(("provider", "variable"), VARIABLES)
def test_every_variable_of_a_server_leads_to_it(provider, variable, of_one_key, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, f"http://127.0.0.1:{of_one_key.server_port}")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    of_one_key.key = "of no request"
    bucket = shoal.Bucket(f"{provider.schemes[0]}://bucket/run", skip_signature=True)
    with pytest.raises(StorageError, match="ExpiredToken"):
        objects_of(bucket).read("x")
    assert of_one_key.asked >= 1
