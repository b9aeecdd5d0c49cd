"""Where the credentials of a bucket come from: obstore's own chain, or the cloud's Python library.

obstore reads options, environment variables, and the metadata service of the host. It does not read
what people have on their own machines (`~/.aws`, AWS_PROFILE, SSO, `az login`, Google's workload
identity), but the clouds' libraries do: boto3, azure-identity and google-auth, if they are
installed. They are asked only where options and variables name nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from shoal.checkpoint.bucket.providers import AZURE, GCS, S3, Provider
from shoal.errors import UsageError

_REFRESH = timedelta(minutes=5)  # obstore keeps only what lasts longer: it asks at each request
_AWS_FILES = (  # of boto3: the variable that names the file, and where it is otherwise
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("AWS_CONFIG_FILE", "~/.aws/config"),
)
_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_GOOGLE_FILE = "~/.config/gcloud/application_default_credentials.json"
_OBSTORES_TYPES = ("service_account", "authorized_user")  # of such a file


class Credentials(NamedTuple):
    """What a bucket is reached with."""

    provider: Any  # None: obstore's own chain
    config: Mapping[str, Any]  # such as the region of a profile
    source: str  # where they came from; never what they are
    advice: str = ""  # what to do if they do not suffice

    @property
    def stamp(self) -> object:
        """Of the files that they were found in; None: of no file."""
        return getattr(self.provider, "stamp", None)

    def have_changed(self, stamp: object) -> bool:
        """Have the files changed since they had this stamp?"""
        return isinstance(self.provider, _Boto3) and stamp != _aws_stamp()


class _Cloud(NamedTuple):
    prefix: str  # of obstore's variables
    options: tuple[str, ...]  # that name credentials
    variables: tuple[str, ...]  # that do so, too
    library: str
    provide: Callable[[], Any]
    advice: str


class _Boto3:
    """What boto3 finds, found anew when its files have changed: helpers rewrite keys there."""

    def __init__(self) -> None:
        self._find()

    def _find(self) -> None:
        from obstore.auth.boto3 import Boto3CredentialProvider

        stamp = _aws_stamp()
        self.provider = Boto3CredentialProvider(ttl=_REFRESH)  # of a new session
        self.config, self.stamp = self.provider.config, stamp
        self.source = f"boto3 ({self.provider.credentials.method})"

    def __call__(self) -> Any:
        if _aws_stamp() != self.stamp:
            with contextlib.suppress(Exception):  # half written: the next request tries again
                self._find()
        return self.provider()


def _aws_stamp() -> object:
    """Return a value that changes when a file that boto3 reads does."""
    stamps = []
    for variable, path in _AWS_FILES:
        with contextlib.suppress(OSError):
            there = os.stat(os.path.expanduser(os.environ.get(variable) or path))
            stamps.append((there.st_ino, there.st_mtime_ns, there.st_size))
    return stamps


def _azure() -> Any:
    from obstore.auth.azure import AzureCredentialProvider

    return AzureCredentialProvider()


def _google() -> Any:
    """Return a provider for kinds of files that obstore does not read, such as external_account."""
    path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or os.path.expanduser(_GOOGLE_FILE)
    with open(path, encoding="utf-8") as file:
        if json.load(file).get("type") in _OBSTORES_TYPES:
            raise LookupError("obstore reads this file")
    from obstore.auth.google import GoogleCredentialProvider

    provider: Any = GoogleCredentialProvider()
    if getattr(provider.credentials, "requires_scopes", False):
        provider.credentials = provider.credentials.with_scopes([_GOOGLE_SCOPE])
    return provider


_CLOUDS = {
    S3: _Cloud(
        prefix="AWS_",
        options=(
            "access_key_id",
            "skip_signature",
            "web_identity_token_file",
            "container_credentials_relative_uri",
            "container_credentials_full_uri",
        ),
        variables=(),
        library="boto3",
        provide=_Boto3,
        advice="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    GCS: _Cloud(
        prefix="GOOGLE_",
        options=(
            "service_account",
            "service_account_path",
            "service_account_key",
            "bearer_token",
            "application_credentials",
            "skip_signature",
        ),
        variables=(),
        library="google-auth",
        provide=_google,
        advice="set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    ),
    AZURE: _Cloud(
        prefix="AZURE_STORAGE_",
        options=(
            "account_key",
            "access_key",
            "sas_key",
            "sas_token",
            "client_id",
            "client_secret",
            "token",
            "bearer_token",
            "federated_token_file",
            "skip_signature",
            "use_emulator",
            "use_azure_cli",
        ),
        variables=("AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE"),
        library="azure-identity",
        provide=_azure,
        advice="set AZURE_STORAGE_ACCOUNT_KEY",
    ),
}


def credentials(provider: Provider, config: Mapping[str, Any]) -> Credentials:
    """Return what a bucket of this provider is reached with.

    Raises:
      UsageError: a variable, or a setting of boto3, is wrong.
    """
    cloud = _CLOUDS[provider]
    for name in sorted(os.environ):
        value = os.environ[name]
        if name.startswith(cloud.prefix) and value.strip() != value:
            raise UsageError(f"the variable {name} begins or ends with a space or a line break")
    for name, value in config.items():
        is_named = name.lower().removeprefix(cloud.prefix.lower()) in cloud.options
        if is_named and _is_meant(value):
            return Credentials(None, {}, f"the option {name}=")
    names = (*(cloud.prefix + name.upper() for name in cloud.options), *cloud.variables)
    set_here = [name for name in names if _is_meant(os.environ.get(name))]
    if set_here and not (provider is GCS and set_here == ["GOOGLE_APPLICATION_CREDENTIALS"]):
        return Credentials(None, {}, f"the variable {set_here[0]}")
    chain = set_here[0] if set_here else "the metadata service of this host"
    advice = "" if set_here else cloud.advice
    try:
        provided = cloud.provide()
    except ImportError:
        hint = "" if provider is GCS else f"; {_unread(provider)}with {cloud.library} installed"
        return Credentials(None, {}, f"{chain}{hint}", advice)
    except Exception as error:  # noqa: BLE001 - each library has errors of its own for "none"
        if provider.is_s3 and type(error) is not ValueError:  # that is how obstore says "none"
            raise UsageError(
                f"boto3 cannot use the settings of this user (~/.aws, AWS_PROFILE): {error}"
            ) from None
        return Credentials(None, {}, chain, advice)
    if isinstance(provided, _Boto3):
        return Credentials(provided, provided.config, provided.source)
    return Credentials(provided, getattr(provided, "config", {}), cloud.library)


def _is_meant(value: object) -> bool:
    return str(value).lower() not in ("", "none", "false", "0")


def _unread(provider: Provider) -> str:
    """Return what is here, and only the library reads."""
    if provider is AZURE:
        return "`az login` and managed identities by name are found "
    here = "AWS_PROFILE is set, and " if os.environ.get("AWS_PROFILE") else ""
    with contextlib.suppress(OSError):
        os.stat(os.path.expanduser("~/.aws"))
        return f"{here}~/.aws is read only "
    return f"{here}profiles and SSO are found "
