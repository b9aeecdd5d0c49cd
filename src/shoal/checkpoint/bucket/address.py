"""`Bucket`: the address of a bucket, and how to reach it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.errors import UsageError, UsageTypeError

if TYPE_CHECKING:
    from shoal.checkpoint.bucket.object_store import ObjectStore

# pathlib makes s3:/bucket of s3://bucket.
_ADDRESS = re.compile(r"(s3|s3a|gs|az|azure|abfs|abfss|adl):/+([^/]+)/*(.*)", re.DOTALL)


class Bucket:
    """A place in a bucket of S3, GCS or Azure, reached by obstore.

    Credentials are those of obstore's own variables and options. Nothing is sent before the first
    call that uses it.

    Args:
      url: `s3://bucket/run`, `gs://bucket/run`, `az://container/run`.
      store: an obstore store of the bucket, for what `config` cannot say; the path of `url` is
        below its prefix.
      config: obstore's options of the service (`endpoint=`, `region=`, `access_key_id=`, …), and
        `client_options=`, `retry_config=`, `credential_provider=`.

    Raises:
      UsageError: the address or an option is wrong, or obstore is not installed.
    """

    def __init__(self, url: str | os.PathLike[str], *, store: Any = None, **config: Any) -> None:
        if not isinstance(url, str | os.PathLike):
            raise UsageTypeError(f"Bucket: url={url!r} must be a string")
        match = _ADDRESS.fullmatch(os.fspath(url))
        if match is None:
            raise UsageError(
                f"Bucket: url={os.fspath(url)!r} is no address of a bucket: "
                "write s3://bucket/run, gs://bucket/run or az://container/run"
            )
        scheme, bucket, path = match.groups()
        self._prefix = "/".join(part for part in path.split("/") if part)
        self._address = f"{scheme}://{bucket}"
        self.url = f"{self._address}/{self._prefix}".rstrip("/")
        transport = _transport(self.url)
        if store is not None:
            if config:
                raise UsageError(f"Bucket: pass store=, or {', '.join(sorted(config))}, not both")
            self._stores = store, store
            return
        if scheme in ("az", "azure") and not _names_account(config):
            raise UsageError(
                f"Bucket({self.url!r}): which storage account? Pass account_name=, or set "
                "AZURE_STORAGE_ACCOUNT_NAME"
            )
        credentials = config.pop("credential_provider", None)
        if _is_plain_http(config):  # the user's own choice: a server on this host, or a test
            config["client_options"] = {"allow_http": True, **config.get("client_options", {})}
        self._stores = transport.open_stores(self._address, dict(config), credentials)

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def __str__(self) -> str:
        return self.url

    def objects(self) -> ObjectStore:
        """Return its store, as saves and restores use it."""
        from shoal.checkpoint.bucket.object_store import ObjectStore

        transport = _transport(self.url)
        return ObjectStore(transport.ObstoreObjects(self.url, self._prefix, self._stores))


def _transport(url: str) -> Any:
    try:
        from shoal.checkpoint.bucket import transport
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise UsageError(f"{url}: buckets need obstore: pip install shoal[cloud]") from None
    return transport


def _names_account(config: Mapping[str, Any]) -> bool:
    names = {name.lower() for name in (*config, *os.environ)}
    known = ("account_name", "azure_storage_account_name", "azure_storage_connection_string")
    return any(name in names for name in known) or "use_emulator" in names


def _is_plain_http(config: Mapping[str, Any]) -> bool:
    """Is the endpoint that was given, or set, an http:// address?"""
    given = [value for name, value in config.items() if "endpoint" in name.lower()]
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    given += [os.environ[name] for name in names if name in os.environ and not given]
    return any(str(value).startswith("http://") for value in given)
