"""`Bucket`: the address of a bucket, and how to reach it."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shoal.arguments import check_flags
from shoal.checkpoint.bucket.credentials import Credentials, credentials
from shoal.checkpoint.bucket.providers import AZURE, BY_SCHEME, Provider
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError
from shoal.paths import host_of
from shoal.runtime import process

if TYPE_CHECKING:
    from shoal.checkpoint.bucket.object_store import ObjectStore
    from shoal.checkpoint.bucket.objects import Objects

_LOG = logging.getLogger("shoal")

# pathlib makes s3:/bucket of s3://bucket.
_SCHEME = re.compile(f"({'|'.join(BY_SCHEME)}):/", re.IGNORECASE)
_ADDRESS = re.compile(f"{_SCHEME.pattern}/?([^/]+)/+(.*)", re.DOTALL | re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_OF_CLIENT = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "http1_only",
    "http2_only", "proxy_url", "proxy_ca_certificate", "read_timeout", "timeout", "user_agent",
)  # fmt: skip
_UNORDERED = "--x-s3"  # the end of the names of S3's directory buckets
_AZURE_ACCOUNT = (
    "account_name",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "use_emulator",
    "AZURE_STORAGE_USE_EMULATOR",
)


def is_address(text: str) -> bool:
    """Is this the address of a bucket, rather than a path? It may be a wrong one."""
    return _SCHEME.match(text) is not None


@local
class Bucket:
    """A place in a bucket of S3, GCS or Azure, wherever the path of a checkpoint is taken.

    Local.

    An address alone, such as `shoal.save("s3://bucket/run", …)`, is `Bucket(address)`: this class
    is for what an address cannot say. Requests are sent by obstore (`pip install 'obstore>=0.12'`),
    none before the first call that uses the bucket. Credentials are found in this order: options,
    obstore's environment variables, what boto3 or azure-identity find if they are installed, and
    the metadata service of the host.

    Args:
      url: `s3://bucket/run`, `gs://bucket/run` or `az://container/run`.
      single_writer: your word that no two jobs ever save here at a time. Then a server that ignores
        the conditions of writes is not refused. COMMIT records it.
      store: an obstore store of this bucket, for what options cannot say. If it has a prefix, the
        path of `url` is below it.
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
            raise UsageTypeError(f"Bucket: url must be a string, not {type(url).__name__}")
        check_flags("Bucket", single_writer=single_writer)
        scheme, bucket, parts = _parsed(os.fspath(url))
        address = f"{scheme}://{bucket}"
        self.url = "/".join([address, *parts])
        self._prefix = "/".join(parts)
        self._is_single_writer = single_writer
        provider, transport = BY_SCHEME[scheme], _transport(self.url)
        if store is not None:
            if options:
                raise UsageError(f"Bucket: pass store=, or {', '.join(sorted(options))}, not both")
            # The store adds its own prefix to the names of objects, but messages must show it.
            above = transport.prefix_of(store, provider, bucket, self.url)
            self.url = "/".join([address, *above, *parts])
            self._stores = (store, store)
            self._credentials = Credentials(None, {}, "the store that was passed")
            return
        _check(self.url, provider, bucket, options)
        # Plain http is the user's own choice: a server on this host, or a test.
        if any(endpoint.startswith("http://") for endpoint in _endpoints(provider, options)):
            client = options.get("client_options") or {}
            options["client_options"] = {"allow_http": True, **client}
        self._credentials = _credentials_of(provider, options)
        keys = self._credentials.provider
        self._stores = transport.open_stores(address, self.url, options, keys)

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def __str__(self) -> str:
        return self.url

    @property
    def credentials(self) -> str:
        """Where its credentials came from, in words; never what they are."""
        return self._credentials.source

    @cached_property
    def _objects(self) -> Objects:
        transport, here = _transport(self.url), _processes_here()
        _LOG.info("%s: credentials: %s", self.url, self.credentials)
        objects: Objects = transport.ObstoreObjects(
            self.url, self._prefix, self._stores, here, self._credentials
        )
        return objects

    @cached_property
    def _store(self) -> ObjectStore:
        from shoal.checkpoint.bucket.object_store import Access, ObjectStore

        objects = self._objects
        return ObjectStore(objects, Access(objects, self._is_single_writer, _processes_here()))


def store_of(bucket: Bucket) -> ObjectStore:
    """Return the store of a bucket, as saves and restores use it."""
    return bucket._store


def below(bucket: Bucket, name: str) -> Bucket:
    """Return a place below another one, reached in the same way."""
    folder = copy.copy(bucket)
    for opened in ("_objects", "_store"):
        vars(folder).pop(opened, None)
    folder.url, folder._prefix = f"{bucket.url}/{name}", f"{bucket._prefix}/{name}"
    return folder


def objects_of(bucket: Bucket) -> Objects:
    """Return the objects of a bucket, without a store's rules."""
    return bucket._objects


def _transport(url: str) -> Any:
    try:
        from shoal.checkpoint.bucket import transport
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise UsageError(f"{url}: buckets need obstore: pip install 'obstore>=0.12'") from None
    return transport


def _parsed(url: str) -> tuple[str, str, list[str]]:
    """Return scheme, bucket and the parts of the path."""
    write = "write s3://bucket/run, gs://bucket/run or az://container/run"
    if ":" in host_of(url):
        raise UsageError(
            "Bucket: no name of a bucket has a colon: write s3://bucket/run, and name a server "
            "of your own by endpoint= or AWS_ENDPOINT_URL"
        )
    match = _ADDRESS.fullmatch(url)
    if match is None:
        raise UsageError(f"Bucket: url={url!r} does not name a place in a bucket: {write}")
    scheme = match[1].lower()
    parts = [part for part in match[3].split("/") if part]
    if not parts:
        raise UsageError(f"Bucket: url={url!r} names a bucket, and no place in it: {write}")
    if {".", ".."} & {*parts}:
        raise UsageError(f"Bucket: url={url!r}: a bucket has no folders . and ..")
    if BY_SCHEME[scheme].is_s3 and match[2].endswith(_UNORDERED):
        raise UsageError(
            f"Bucket: url={url!r}: directory buckets of S3 list names in no order, and are not "
            "supported: use a general purpose bucket"
        )
    if _CONTROL.search(url):
        raise UsageError(f"Bucket: url={url!r}: a name must not hold control characters")
    return scheme, match[2], parts


def _credentials_of(provider: Provider, options: dict[str, Any]) -> Credentials:
    """Take the credentials from the options, or find them, and add the region found with them."""
    given = options.pop("credential_provider", None)
    if given is not None:
        return Credentials(given, {}, "the option credential_provider=")
    chosen = credentials(provider, options)
    if "region" in chosen.config and not _is_given(options, "region", "AWS_REGION"):
        options["region"] = chosen.config["region"]
    return chosen


def _check(url: str, provider: Provider, bucket: str, options: Mapping[str, Any]) -> None:
    """Refuse addresses and options that cannot work."""
    for name, value in options.items():
        known = name.lower()
        if known in ("bucket", "bucket_name", "container_name", "prefix", "config"):
            raise UsageError(
                f"Bucket({url!r}): {name}= is not taken: the address says where, and options of "
                "the service are arguments of their own"
            )
        if known in _OF_CLIENT:
            raise UsageError(
                f"Bucket({url!r}): {name}= is an option of the client: write "
                f"client_options={{{name!r}: …}}"
            )
        if value is None:
            raise UsageError(f"Bucket({url!r}): {name}=None: leave it out")
    endpoints = _endpoints(provider, options)
    for endpoint in endpoints:
        if "@" in endpoint:
            raise UsageError(
                f"Bucket({url!r}): an endpoint must not hold credentials: pass them as options"
            )
        if not endpoint.startswith(("http://", "https://")):
            raise UsageError(
                f"Bucket({url!r}): the endpoint {endpoint!r} must begin with http:// or https://"
            )
    virtual = [value for name, value in options.items() if "virtual_hosted" in name.lower()]
    virtual = virtual or [os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "")]
    if provider.is_s3 and str(virtual[0]).lower() in ("true", "1"):
        for endpoint in endpoints:
            if not endpoint.partition("://")[2].startswith(f"{bucket}."):
                raise UsageError(
                    f"Bucket({url!r}): with virtual_hosted_style_request, the endpoint must begin "
                    f"with the bucket's name, as in https://{bucket}.…, and is {endpoint!r}: "
                    "requests would go to another bucket"
                )
    if provider is AZURE and "@" not in bucket and not _is_given(options, *_AZURE_ACCOUNT):
        raise UsageError(
            f"Bucket({url!r}): which storage account? Pass account_name=, or set "
            "AZURE_STORAGE_ACCOUNT_NAME"
        )
    if provider.is_s3 and any("storage.googleapis.com" in endpoint for endpoint in endpoints):
        gs = f"gs:{url.partition(':')[2]}"
        raise UsageError(
            f"Bucket({url!r}): GCS ignores conditions in requests of S3, so of two saves of one "
            f"step both would be committed: write {gs!r}, without the endpoint"
        )


def _is_given(options: Mapping[str, Any], *names: str) -> bool:
    """Is one of these given, as an option or a variable?"""
    given = {name.lower() for name in options} | {name for name in names if os.environ.get(name)}
    return any(name in given or name.lower() in given for name in names)


def _endpoints(provider: Provider, options: Mapping[str, Any]) -> list[str]:
    """Return the endpoints that were given, or else set."""
    names = ("endpoint", "base_url")
    given = [str(value) for name, value in options.items() if any(n in name.lower() for n in names)]
    return given or [os.environ[name] for name in provider.endpoints if os.environ.get(name)]


def _processes_here() -> int:
    """Return how many processes of the job share this host's network and memory."""
    if not process.is_initialized():
        return 1
    client = process.client()
    hosts = client.hosts
    return max(1, hosts.count(hosts[client.process]))
