"""`Bucket`: the address of a bucket, and how to reach it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shoal.arguments import check_flags
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError
from shoal.runtime import process

if TYPE_CHECKING:
    from shoal.checkpoint.bucket.object_store import ObjectStore
    from shoal.checkpoint.bucket.objects import Objects

_LOG = logging.getLogger("shoal")

# pathlib makes s3:/bucket of s3://bucket.
_ADDRESS = re.compile(
    r"(s3|s3a|gs|az|azure|abfs|abfss|adl):/+([^/]+)/*(.*)", re.DOTALL | re.IGNORECASE
)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_UNORDERED = "--x-s3"  # the end of the names of S3's directory buckets


def is_address(text: str) -> bool:
    """Is this the address of a bucket, rather than a path?"""
    return _ADDRESS.fullmatch(text) is not None


@local
class Bucket:
    """A place in a bucket of S3, GCS or Azure, wherever the path of a checkpoint is taken.

    Local.

    An address alone, such as `shoal.save("s3://bucket/run", …)`, is `Bucket(address)`: this class
    is for what an address cannot say. Requests are sent by obstore (`pip install shoal[cloud]`),
    none before the first call that uses the bucket. Credentials are found in this order: options,
    obstore's environment variables, what boto3 or azure-identity find if they are installed, and
    the metadata service of the host.

    Args:
      url: `s3://bucket/run`, `gs://bucket/run` or `az://container/run`.
      single_writer: your word that no two jobs ever save here at a time. Then a server that ignores
        the conditions of writes is not refused. COMMIT records it.
      store: an obstore store of the bucket, for what options cannot say; `run` of `url` is below
        the prefix of that store, if it has one.
      options: obstore's options: of the service (`endpoint=`, `region=`, `access_key_id=`,
        `account_name=`, …), `client_options=`, `retry_config=`, `credential_provider=`.

    Raises:
      UsageError: the address or an option is wrong, or obstore is not installed.

    Example:
      >>> Bucket("s3://models/run", region="eu-central-1", skip_signature=True)
      Bucket('s3://models/run')
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        single_writer: bool = False,
        store: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(url, str | os.PathLike):
            raise UsageTypeError(f"Bucket: url={url!r} must be a string")
        check_flags("Bucket", single_writer=single_writer)
        match = _ADDRESS.fullmatch(os.fspath(url))
        if match is None:
            raise UsageError(
                f"Bucket: url={os.fspath(url)!r} is no address of a bucket: "
                "write s3://bucket/run, gs://bucket/run or az://container/run"
            )
        scheme, bucket, path = match[1].lower(), match[2], match[3]
        parts = [part for part in path.split("/") if part]
        self._prefix, self._is_single_writer = "/".join(parts), single_writer
        address = f"{scheme}://{bucket}"
        self.url = f"{address}/{self._prefix}".rstrip("/")
        transport = _transport(self.url)
        if {".", ".."} & {*parts}:
            raise UsageError(f"Bucket({self.url!r}): a bucket has no folders . and ..")
        if store is not None:
            if options:
                raise UsageError(f"Bucket: pass store=, or {', '.join(sorted(options))}, not both")
            self._stores, self._source = (store, store), "of the store"
            return
        _check(self.url, scheme, bucket, options)
        if _is_plain_http(options):  # the user's own choice: a server on this host, or a test
            options["client_options"] = {"allow_http": True, **options.get("client_options", {})}
        provider = options.pop("credential_provider", None)
        self._source = "the option credential_provider="
        if provider is None:
            from shoal.checkpoint.bucket.credentials import credentials

            found = credentials(scheme, options)
            provider, self._source = found.provider, found.source
            if "region" in found.config and not _names(options, "region", "AWS_REGION"):
                options["region"] = found.config["region"]
        self._stores = transport.open_stores(address, options, provider)

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def __str__(self) -> str:
        return self.url

    @property
    def credentials(self) -> str:
        """Where its credentials came from, in words; never what they are."""
        return self._source

    @cached_property
    def _objects(self) -> Objects:
        transport, here = _transport(self.url), _processes_here()
        _LOG.info("%s: credentials: %s", self.url, self._source)
        found: Objects = transport.ObstoreObjects(
            self.url, self._prefix, self._stores, here, self._source
        )
        return found

    @cached_property
    def _store(self) -> ObjectStore:
        from shoal.checkpoint.bucket.object_store import Access, ObjectStore

        objects = self._objects
        return ObjectStore(objects, Access(objects, self._is_single_writer, _processes_here()))


def store_of(bucket: Bucket) -> ObjectStore:
    """Return the store of a bucket, as saves and restores use it."""
    return bucket._store


def objects_of(bucket: Bucket) -> Objects:
    """Return the objects of a bucket, without a store's rules."""
    return bucket._objects


def _transport(url: str) -> Any:
    try:
        from shoal.checkpoint.bucket import transport
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise UsageError(f"{url}: buckets need obstore: pip install shoal[cloud]") from None
    return transport


def _check(url: str, scheme: str, bucket: str, options: Mapping[str, Any]) -> None:
    """Refuse addresses that cannot work."""
    if scheme in ("az", "azure") and not _names(
        options, "account_name", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING",
        "use_emulator", "AZURE_STORAGE_USE_EMULATOR",
    ):  # fmt: skip
        raise UsageError(
            f"Bucket({url!r}): which storage account? Pass account_name=, or set "
            "AZURE_STORAGE_ACCOUNT_NAME"
        )
    if scheme in ("s3", "s3a") and bucket.endswith(_UNORDERED):
        raise UsageError(
            f"Bucket({url!r}): directory buckets of S3 list names in no order, and are not "
            "supported: use a general purpose bucket"
        )
    if scheme in ("s3", "s3a") and any("storage.googleapis.com" in one for one in _urls(options)):
        gs = "gs" + url[len(scheme) :]
        raise UsageError(
            f"Bucket({url!r}): GCS ignores conditions in requests of S3, so of two saves of one "
            f"step both would be committed: write {gs!r}, without the endpoint"
        )


def _names(options: Mapping[str, Any], *names: str) -> bool:
    """Is one of these given, as an option or a variable?"""
    given = {name.lower() for name in options} | {name for name in names if os.environ.get(name)}
    return any(name in given or name.lower() in given for name in names)


def _urls(options: Mapping[str, Any]) -> list[str]:
    """Return the endpoints that were given, or else set."""
    given = [str(value) for name, value in options.items() if "endpoint" in name.lower()]
    return given or [os.environ[name] for name in _ENDPOINTS if os.environ.get(name)]


def _is_plain_http(options: Mapping[str, Any]) -> bool:
    return any(url.startswith("http://") for url in _urls(options))


def _processes_here() -> int:
    """Return how many processes of the job share this host's network and memory."""
    if not process.is_initialized():
        return 1
    coordinator = process.coordinator()
    hosts = coordinator.hosts
    return max(1, hosts.count(hosts[coordinator.process]))
