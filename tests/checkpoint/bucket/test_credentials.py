"""Where credentials are found, and that they are never shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from checkpoint.bucket import servers
from shoal.checkpoint.bucket.credentials import credentials

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
def test_what_obstore_finds_itself(scheme, options, variables, source, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = credentials(scheme, options)
    assert found.provider is None
    assert found.source == source


@pytest.mark.parametrize("kind", ["service_account", "authorized_user"])
def test_files_of_google_that_obstore_reads(kind, tmp_path, monkeypatch):
    path = tmp_path / "key.json"
    path.write_text(json.dumps({"type": kind}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    assert credentials("gs", {})[:3] == (None, {}, "GOOGLE_APPLICATION_CREDENTIALS")


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
    assert done.stdout == "boto3 {'n': 1} eu-central-1\n", done


def test_without_the_library_it_is_named(monkeypatch):
    for name in ("obstore.auth.boto3", "obstore.auth.azure"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it could not be imported
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert credentials("s3", {}).source == (
        "the metadata service of this host; AWS_PROFILE is set, and profiles and SSO are found "
        "with boto3 installed"
    )
    assert credentials("az", {}).source == (
        "the metadata service of this host; `az login` and managed identities by name are found "
        "with azure-identity installed"
    )
