"""Objects of S3, GCS and Azure, by obstore: its requests run on one thread, with an event loop.

On a loop, because a blocking call of obstore hears no Ctrl-C until it returns. The thread is
started before it is needed: an interpreter that ends starts none, and a save may have to finish
then.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import html
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, TypeVar

import obstore
from obstore import exceptions

from shoal.checkpoint.bucket.credentials import Credentials
from shoal.checkpoint.bucket.objects import (
    FoundPart,
    ObjectInfo,
    PrefixContents,
    UnclearError,
    scattered,
)
from shoal.checkpoint.bucket.providers import Provider, provider_of
from shoal.checkpoint.store.interface import Left, OpenFile
from shoal.errors import ShoalError, StorageError, UsageError
from shoal.runtime.system.threads import ended_with_others

Value = TypeVar("Value")

_LOG = logging.getLogger("shoal")

PART_BYTES = 8 << 20  # of an upload; each part is retried by itself
_MOST_PARTS = 9000  # services allow 10,000
_SLOWEST_BYTES_S = 128 << 10  # an upload that is slower than this is cut and tried again
_UPLOADS = 8  # parts in flight, of all processes of a host
_AHEAD_BYTES = 32 << 20  # that files may be ahead of their uploads, of all processes of a host
_LOOK_S = 1.0  # an interrupt may keep a writer from being called
_LEAST_S = 5.0  # that each request has, also after a deadline
_KEPT_S = 0.2  # obstore asks for keys at most every 0.1 s
_SLOW_S = 10.0  # a request that takes longer is logged
_READ_TIMEOUT = timedelta(seconds=30)  # without a byte
_NO_TIMEOUT = timedelta(days=7)  # of a whole request: it would cut slow transfers that go on
_CONNECT_TIMEOUT = timedelta(seconds=10)
_RETRY_S = 180
# Time alone ends the retries: 10 of them, with obstore's own pauses, were over after 2 to 11 s.
_PAUSES = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
_RETRIES = {
    "max_retries": 1 << 16, "retry_timeout": timedelta(seconds=_RETRY_S), "backoff": _PAUSES,
}  # fmt: skip
# Of obstore's messages.
_STATUS = re.compile(r"status code: (\d{3}) ([^:\n]*)")
_BODY = re.compile(r"<(?:Code|Message)>([^<]*)<")
_CODE = re.compile(r"<Code>([^<]*)<")
_PAGE = re.compile(r"status code: \d{3} [^:\n]*:\s*<(?:!doctype html|html)\b", re.IGNORECASE)
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*([^,]*?)[\s,)]*,", re.DOTALL)
_PROXY_REFUSES = "ProxyAuthRequired"
_REDIRECT = "BareRedirect"
_NO_CONNECTION = "kind: Connect"
_INNERMOST = re.compile(r'(?:message|error): "([^"]*)"|(TimedOut)')
_SERVER = re.compile(r"https?://[^\s/?]+")
_RETRIED = re.compile(r"after (\d+) retries")
_FOREIGN = re.compile(r'path: ("(?:[^"\\]|\\.)*")')  # what obstore cannot name
_QUERY = re.compile(r"\?[^\s\"')]*=[^\s\"')]*")  # of an address: it may hold a signature

_ABSENT = (FileNotFoundError, exceptions.NotFoundError)
_CONFLICTS = (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError)
_NOT_FOUND, _FORBIDDEN, _NOT_IMPLEMENTED = 404, (401, 403), 501
_FIRST_ERROR, _FIRST_FAILURE = 400, 500  # statuses in between: nothing was done
# What codes of refusals mean, where it is not that a right is missing.
_MEANINGS = {
    "RequestTimeTooSkewed": "the clock of this host is wrong: synchronize it (chrony, ntpd)",
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key is not that of the access key, or a proxy changes "
    "requests",
    "ExpiredToken": "these credentials have expired: renew them",
    "TokenRefreshRequired": "these credentials have expired: renew them",
    "InvalidToken": "the session token is not that of the keys",
    "InvalidObjectState": "the object is in an archive: restore it from there first",
    "AuthenticationFailed": "the account key or token is wrong, or the clock of this host is",
    "AccountIsDisabled": "the storage account is disabled",
}
_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)


class _Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._pid, self._is_over = os.getpid(), False
        self.loop = asyncio.new_event_loop()
        run = self.loop.run_forever
        self._thread = threading.Thread(target=run, name="shoal bucket", daemon=True)
        self._thread.start()
        # Python joins the threads of saves before this. A thread of obstore that still met an
        # interpreter in its teardown would abort the process.
        atexit.register(self._end)

    def _end(self) -> None:
        if os.getpid() == self._pid:
            self._is_over = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def start(self, request: Callable[[], Awaitable[Value]]) -> Future[Value]:
        """Begin a request there: obstore's functions look for the loop when they are called.

        Raises:
          UsageError: in a forked child, where obstore's own threads are missing and it would hang.
          StorageError: at the end of the interpreter.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                "a forked process cannot use a bucket that its parent has used: start it with "
                "multiprocessing's `spawn`, or by subprocess"
            )

        if self._is_over:
            raise StorageError("the interpreter is ending: the bucket cannot be reached any more")

        async def run() -> Value:
            return await request()

        return asyncio.run_coroutine_threadsafe(run(), self.loop)

    def run(self, request: Callable[[], Awaitable[Value]], slow: str, limit_s: float) -> Value:
        """Run a request there and return its result; an interrupt cancels it.

        `slow` is logged if it takes long.

        Raises:
          TimeoutError: there was no answer within `limit_s`.
        """
        future = self.start(request)
        try:
            log = partial(_LOG.warning, "%s", slow)
            with ended_with_others(future.cancel):
                if not _in_time(partial(_has_ended, future), limit_s, log):
                    raise TimeoutError(
                        f"no answer within {limit_s:.0f} s, and the deadline of the call is over "
                        "(timeout_s=, or SHOAL_TIMEOUT_S)"
                    )
                return future.result()
        except BaseException:
            future.cancel()
            raise


def _in_time(wait_s: Callable[[float], bool], limit_s: float, log: Callable[[], None]) -> bool:
    """Wait for at most `limit_s`, and return whether it came; `log` is called if it takes long."""
    if wait_s(min(_SLOW_S, limit_s)):
        return True
    if limit_s <= _SLOW_S:
        return False
    log()
    return wait_s(limit_s - _SLOW_S)


def _has_ended(future: Future[Any], timeout_s: float) -> bool:
    return bool(wait([future], timeout_s).done)


@lru_cache(maxsize=1)
def _loop() -> _Loop:
    return _Loop()


def open_stores(
    address: str, url: str, config: dict[str, Any], credentials: Any = None
) -> tuple[Any, Any]:
    """Return obstore's stores of a bucket: for all requests, and for uploads.

    For uploads, obstore's `read_timeout` limits the time of a whole part, and not silence.

    Raises:
      UsageError: the address or the configuration is wrong.
    """
    client = {"timeout": _NO_TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT}
    client |= config.pop("client_options", None) or {}
    options: dict[str, Any] = {"retry_config": config.pop("retry_config", None) or _RETRIES}
    if credentials is not None:
        options["credential_provider"] = credentials
    part_s = PART_BYTES / _SLOWEST_BYTES_S
    limits = _READ_TIMEOUT, timedelta(seconds=part_s)
    make: Any = obstore.store.from_url
    bundle = os.environ.get("AWS_CA_BUNDLE") if provider_of(address).is_s3 else None
    try:
        with _certificates(bundle):
            stores = [
                make(
                    address,
                    config=config,
                    client_options={"read_timeout": limit, **client},
                    **options,
                )
                for limit in limits
            ]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of Rust is no Exception
        raise UsageError(f"Bucket({url!r}): {reason(error)[1]}") from None
    return stores[0], stores[1]


@contextlib.contextmanager
def _certificates(bundle: str | None) -> Iterator[None]:
    """Let new stores trust the authorities in a file: obstore takes it from SSL_CERT_FILE alone."""
    before = os.environ.get("SSL_CERT_FILE")
    if bundle:
        os.environ["SSL_CERT_FILE"] = bundle
    try:
        yield
    finally:
        if before is not None:
            os.environ["SSL_CERT_FILE"] = before
        elif bundle:
            del os.environ["SSL_CERT_FILE"]


def prefix_of(store: Any, provider: Provider, bucket: str, url: str) -> list[str]:
    """Return the parts of a store's prefix.

    Raises:
      UsageError: it is no store of this bucket.
    """
    kind: Any = getattr(obstore.store, provider.store)
    if not isinstance(store, kind):
        raise UsageError(f"Bucket({url!r}): store={store!r} must be an obstore {kind.__name__}")
    there = {str(store.config.get(name)) for name in ("bucket", "container_name")} - {"None"}
    if there and bucket.partition("@")[0] not in there:
        raise UsageError(f"Bucket({url!r}): store= is of the bucket {there.pop()!r}")
    return [part for part in str(store.prefix or "").split("/") if part]


class ObstoreObjects:
    """See `Objects`."""

    def __init__(
        self,
        url: str,
        prefix: str,
        stores: tuple[Any, Any],
        processes_here: int,
        credentials: Credentials,
        left: Left = lambda: math.inf,
    ) -> None:
        """Take part in what a bucket is used for.

        Args:
          prefix: of names, without slashes at its ends; "" is the bucket itself.
          processes_here: of the job, on this host; they share its memory and network.
          credentials: where they came from, for messages.
        """
        self._url, self._prefix, self._stores = url, prefix, stores
        self._here, self._credentials, self._left = processes_here, credentials, left
        self.loop = _loop()

    @property
    def url(self) -> str:
        """See `Objects.url`."""
        return self._url

    @property
    def server(self) -> str:
        """See `Objects.server`."""
        return str(self._stores[0].config.get("endpoint") or "")

    def below(self, name: str) -> ObstoreObjects:
        """See `Objects.below`."""
        return self._like(f"{self._url}/{name}", self._key(name), self._left)

    def limited(self, left: Left) -> ObstoreObjects:
        """See `Objects.limited`."""
        return self._like(self._url, self._prefix, left)

    def _like(self, url: str, prefix: str, left: Left) -> ObstoreObjects:
        return ObstoreObjects(url, prefix, self._stores, self._here, self._credentials, left)

    def limit_s(self) -> float:
        """Return how long a request that begins now may take."""
        return min(max(self._left(), _LEAST_S), threading.TIMEOUT_MAX)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def listed(self) -> PrefixContents:
        """See `Objects.listed`."""
        store, prefix = self._stores[0], self._prefix or None
        contents: Any = self._ask(
            "list", "", lambda: obstore.list_with_delimiter_async(store, prefix), is_of_all=True
        )
        folders = (path.rpartition("/")[2] for path in contents["common_prefixes"])
        return PrefixContents(sorted(map(_info, contents["objects"])), sorted(folders))

    def listed_below(self, start: str, first: str = "") -> dict[str, list[ObjectInfo]]:
        """See `Objects.listed_below`."""
        store, prefix, begin = self._stores[0], self._prefix or None, self._key(start)
        offset = self._key(max(start, first))

        async def listed() -> dict[str, list[ObjectInfo]]:
            folders: dict[str, list[ObjectInfo]] = {}
            async for chunk in obstore.list(store, prefix, offset=offset):
                for info in chunk:
                    if info["path"] < offset:
                        continue  # not every service begins where it should
                    if not info["path"].startswith(begin):
                        return folders  # names come in order
                    folder, slash, name = info["path"][len(begin) - len(start) :].partition("/")
                    if slash and "/" not in name:
                        folders.setdefault(folder, []).append(_info(info))
            return folders

        return self._ask("list", "", listed, is_of_all=True)

    def info(self, name: str) -> ObjectInfo:
        """See `Objects.info`."""
        store, key = self._stores[0], self._key(name)
        return _info(self._ask("look at", name, lambda: obstore.head_async(store, key)))

    def read(self, name: str) -> tuple[bytes, str]:
        """See `Objects.read`."""

        async def get() -> tuple[bytes, str]:
            answer = await obstore.get_async(self._stores[0], self._key(name))
            return bytes(await answer.bytes_async()), _version(answer.meta)

        return self._ask("read", name, get)

    def read_at(self, name: str, offset: int, parts: Sequence[memoryview]) -> FoundPart:
        """See `Objects.read_at`."""
        options: Any = {"range": (offset, offset + sum(map(len, parts)))}

        async def get() -> tuple[Any, Any]:
            answer = await obstore.get_async(self._stores[0], self._key(name), options=options)
            return answer.meta, await answer.bytes_async()

        try:
            meta, data = self._ask("read", name, get)
        except StorageError:
            # Services refuse a range that begins at or behind the end, each in words of its own.
            size = self.info(name).bytes
            if offset < size:
                raise
            return FoundPart(0, size)
        return FoundPart(scattered(memoryview(data), parts), meta["size"])

    def put(self, name: str, data: bytes) -> None:
        """See `Objects.put`."""
        self._put(name, data, "overwrite")

    def put_new(self, name: str, data: bytes) -> None:
        """See `Objects.put_new`."""
        self._put(name, data, "create")

    def put_over(self, name: str, data: bytes, version: str) -> None:
        """See `Objects.put_over`."""
        self._put(name, data, json.loads(version))

    def _put(self, name: str, data: bytes, mode: Any) -> None:
        store, key = self._stores[0], self._key(name)
        self._ask(
            "write", name,
            lambda: obstore.put_async(store, key, data, mode=mode, use_multipart=False),
            is_write=True, has_condition=mode != "overwrite",
        )  # fmt: skip

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """See `Objects.open_new`."""
        return _Upload(self, name, num_bytes, max(PART_BYTES, _AHEAD_BYTES // self._here))

    def remove(self, names: Iterable[str]) -> None:
        """See `Objects.remove`."""
        store, keys = self._stores[0], [self._key(name) for name in names]
        if not keys:
            return
        try:
            self._ask("remove", "", lambda: obstore.delete_async(store, keys))
        except FileNotFoundError:  # some services mind
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._ask("remove", "", partial(obstore.delete_async, store, key))

    def upload(self, name: str, num_bytes: int, parts: AsyncIterator[memoryview]) -> Any:
        """Start to write a large object of such parts; return the future of its end."""
        size = max(PART_BYTES, -(-num_bytes // _MOST_PARTS // (1 << 20)) * (1 << 20))
        store, key, most = self._stores[1], self._key(name), max(1, _UPLOADS // self._here)
        return self.loop.start(
            lambda: obstore.put_async(store, key, parts, chunk_size=size, max_concurrency=most)
        )

    def _ask(
        self,
        doing: str,
        name: str,
        request: Callable[[], Awaitable[Value]],
        *,
        is_write: bool = False,
        has_condition: bool = False,
        is_of_all: bool = False,
    ) -> Value:
        """Run a request; convert its errors.

        Args:
          is_write: its failure leaves open whether it was carried out.
          has_condition: it may fail because the object exists, or has changed.
          is_of_all: it is not about an object, so only the bucket can be missing.
        """
        for _ in range(2):
            stamp = self._credentials.stamp
            try:
                return self.loop.run(request, self.slow(doing, name), self.limit_s())
            except ShoalError:
                raise
            except Exception as error:  # noqa: BLE001 - obstore raises also what Rust did
                is_refused = _is_refused(error)
                problem = self.error(
                    doing, name, error,
                    is_write=is_write, has_condition=has_condition, is_bucket=is_write or is_of_all,
                )  # fmt: skip
            if not is_refused or not self._credentials.have_changed(stamp):
                break
            threading.Event().wait(_KEPT_S)  # and sign with the new keys
        raise problem  # without obstore's own error, whose text may hold what was signed

    def slow(self, doing: str, name: str) -> str:
        """Return what is logged of a request that takes long."""
        return (
            f"{self._at(name)}: a request ({doing}) takes long: the bucket is slow, throttles, or "
            f"cannot be reached; it is retried for up to {_RETRY_S} s"
        )

    def _at(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def _why_refused(self, error: Exception) -> str:
        source, advice = self._credentials.source, self._credentials.advice
        code = _CODE.search(str(error))
        if _PAGE.search(str(error)):
            return "\nthe answer is a page, and not that of a bucket: a proxy or firewall refuses"
        if code and "quota" in code[1].lower():
            return "\nthe quota is used up"
        if code and code[1] in _MEANINGS:
            return f"\n{_MEANINGS[code[1]]}; the credentials came from: {source}"
        message = f"\nthese credentials have no right to do that; they came from: {source}"
        if advice:
            message = f"\nno credentials are set: {advice}; those of {source} do not suffice"
        if provider_of(self._url).is_s3:
            message += "\nS3 also returns 403 for missing objects if you may not list the bucket"
        return message

    def _why_not_reached(self, text: str) -> str:
        """Return what is known of why there was no answer of a bucket; "" if nothing."""
        config = self._stores[0].config
        if _REDIRECT in text:
            region = config.get("region", "us-east-1")
            return (
                f"\nthe bucket is not in the region {region}: set AWS_REGION to its own, which "
                "`aws s3api get-bucket-location` prints"
            )
        if _CERTIFICATE.search(text):
            return (
                "\nthe certificate of the server, or of a proxy, is not trusted: set AWS_CA_BUNDLE "
                "to the file of its authority"
            )
        options = self._stores[0].client_options or {}
        is_https = "https://" in text
        names = ("HTTPS_PROXY", "ALL_PROXY") if is_https else ("HTTP_PROXY", "ALL_PROXY")
        known = {name: os.environ.get(name) or os.environ.get(name.lower()) for name in names}
        known = {"proxy_url": options.get("proxy_url"), **known}
        proxy = next(((name, url) for name, url in known.items() if url), None)
        if proxy is None or _NO_CONNECTION not in text:
            return ""
        what = "demands a login" if _PROXY_REFUSES in text else "may be the reason"
        return (
            f"\nrequests go through the proxy {_without_login(proxy[1])} ({proxy[0]}), which {what}"
        )

    def error(
        self,
        doing: str,
        name: str,
        error: Exception,
        *,
        is_write: bool = False,
        has_condition: bool = False,
        is_bucket: bool = False,
    ) -> OSError | StorageError:
        """Return the error of a request that failed.

        Args:
          is_write, has_condition: see `_ask`.
          is_bucket: if something is missing, it is the bucket, and not the object.
        """
        where = self._at(name)
        if has_condition and isinstance(error, _CONFLICTS):
            return FileExistsError(where)
        status, why = reason(error)
        kind: type[StorageError] = StorageError
        code: int | None = None
        hint = ""
        if isinstance(error, _ABSENT) or status == _NOT_FOUND:
            if not is_bucket:
                return FileNotFoundError(where)
            hint, code = "\nthere is no such bucket", errno.ENOENT
        elif _is_refused(error):
            hint = self._why_refused(error)
        elif isinstance(error, exceptions.InvalidPathError):
            match = _FOREIGN.search(str(error))
            path = match[1] if match else "such a path"
            hint = (
                f"\nanother program has written an object whose name is or begins with {path}, "
                "which cannot be listed: delete it with the tool of the cloud, such as "
                "`aws s3api delete-object`"
            )
        elif status == _NOT_IMPLEMENTED and is_write:
            hint = "\nthis server lacks conditional writes, which a commit needs"
        elif is_write and not _FIRST_ERROR <= status < _FIRST_FAILURE:
            kind, hint = UnclearError, "\nwhether it was written is not known"
        hint += self._why_not_reached(str(error))
        return kind(f"cannot {doing} {where}: {why}{hint}", path=where, errno=code)


def _is_refused(error: Exception) -> bool:
    return isinstance(error, _REFUSED) or reason(error)[0] in _FORBIDDEN


def reason(error: BaseException) -> tuple[int, str]:
    """Return the status of an answer, or 0, and what is worth saying of obstore's message.

    That message is an address, which may hold a signature, the body of an answer, and a dump.
    """
    text = str(error)
    head = text.partition("\n\nDebug source")[0]
    status = _STATUS.search(head)
    message = " ".join((status[2] if status else head.rpartition(" - ")[2]).split())
    if status:
        body = ": ".join(" ".join(field.split()) for field in _BODY.findall(head))
        message = f"{status[1]} {message}" + (f" ({html.unescape(body)})" if body else "")
    else:
        inner, address = _INNERMOST.findall(text), _SERVER.search(head)
        certificate = _CERTIFICATE.search(text)
        if certificate:
            reason = " ".join(re.findall(r"\w+", certificate[1]))
            inner = [(f"invalid certificate: {reason}", "")]
        message += f" ({''.join(inner[-1])})" if inner else ""
        message += f" at {address[0]}" if address else ""
    retries = _RETRIED.search(head)
    if retries:
        message += f", after {retries[1]} retries"
    return int(status[1]) if status else 0, _QUERY.sub("?…", message)[:300]


def _without_login(address: str) -> str:
    return address.rpartition("@")[2]


def _info(meta: Any) -> ObjectInfo:
    name = meta["path"].rpartition("/")[2]
    modified_s = meta["last_modified"].timestamp()
    return ObjectInfo(name, meta["size"], _version(meta), modified_s)


def _version(meta: Any) -> str:
    """Return what obstore takes as the condition of an update."""
    marks = {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}
    return json.dumps(marks, sort_keys=True)


class _Upload:
    """See `OpenFile`: what is written in any order is uploaded in order, as it comes."""

    def __init__(
        self, objects: ObstoreObjects, name: str, num_bytes: int, ahead_bytes: int
    ) -> None:
        self._objects, self._name, self._num_bytes = objects, name, num_bytes
        self._ahead_bytes = ahead_bytes
        self._waiting: dict[int, memoryview] = {}  # by offset
        self._held_bytes = 0
        self._next = 0  # offset of the next part
        self._problem: Exception | None = None
        self._is_slow = self._is_over = False
        # Not a condition: that is Python code, and an interrupt in it would keep its lock taken.
        self._lock = threading.Lock()
        self._writers: list[threading.Lock] = []  # each is released when there may be room
        self._came: asyncio.Event | None = None  # of the loop
        self._ended = objects.upload(name, num_bytes, self._parts())
        self._ended.add_done_callback(lambda _: self._note_end())

    def _note_end(self) -> None:
        with self._lock:
            self._is_over = True
            self._call_writers()

    def _call_writers(self) -> None:
        while self._writers:
            self._writers.pop().release()

    async def _parts(self) -> AsyncIterator[memoryview]:
        self._came = asyncio.Event()
        while self._next < self._num_bytes:
            with self._lock:
                if self._problem is not None:
                    raise self._problem  # obstore aborts the upload
                part = self._waiting.pop(self._next, None)
                self._came.clear()
            if part is None:
                await self._came.wait()
                continue
            with self._lock:
                self._next += len(part)
                self._held_bytes -= len(part)
                self._call_writers()
            yield part

    def write(self, data: memoryview, offset: int) -> None:
        """See `OpenFile.write`."""
        part = data.cast("B")[: max(0, self._num_bytes - offset)]
        limit_s = self._objects.limit_s()
        with ended_with_others(self._give_up):
            is_taken = _in_time(partial(self._wait_for_room, offset), limit_s, self._log_slow)
        with self._lock:
            if not is_taken:
                self._problem = TimeoutError(f"not uploaded within {limit_s:.0f} s")
            if part:
                self._waiting[offset] = part
                self._held_bytes += len(part)
        self._wake()
        if self._problem is not None:
            raise self._error(self._problem)
        if self._is_over:
            self._raise_end()

    def _wait_for_room(self, offset: int, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            room = threading.Lock()
            room.acquire()
            with self._lock:
                # What comes next is always taken, so that a writer never waits for another one.
                has_room = self._held_bytes < self._ahead_bytes or offset == self._next
                if has_room or self._is_over or self._problem is not None:
                    return True
                self._writers.append(room)
            room.acquire(timeout=min(left_s, _LOOK_S))
        return False

    def _log_slow(self) -> None:
        if not self._is_slow:  # once for a file
            self._is_slow = True
            _LOG.warning("%s", self._objects.slow("write", self._name))

    def _wake(self) -> None:
        def came() -> None:
            if self._came is not None:
                self._came.set()

        self._objects.loop.loop.call_soon_threadsafe(came)

    def _raise_end(self) -> None:
        """Return once the upload has succeeded; raise its error."""
        limit_s = self._objects.limit_s()
        try:
            if not _in_time(partial(_has_ended, self._ended), limit_s, self._log_slow):
                self._problem = TimeoutError(f"not uploaded within {limit_s:.0f} s")
                self.discard()
            self._ended.result(0)
        except Exception as error:  # noqa: BLE001 - obstore raises also what Rust did
            problem = self._error(self._problem or error)
        else:
            return
        raise problem

    def _error(self, why: Exception) -> Exception:
        return self._objects.error("write", self._name, why, is_bucket=True)

    def finish(self, num_bytes: int) -> None:
        """See `OpenFile.finish`."""
        self._wake()
        self._raise_end()

    def discard(self) -> None:
        """See `OpenFile.discard`."""
        self._give_up()
        with contextlib.suppress(Exception):  # aborted, or complete
            self._ended.result(_CONNECT_TIMEOUT.total_seconds())
        self._ended.cancel()  # all parts were handed out: it must not complete later

    def _give_up(self) -> None:
        with self._lock:
            self._problem = self._problem or RuntimeError("the save ended")
            self._waiting.clear()
            self._call_writers()
        self._wake()
