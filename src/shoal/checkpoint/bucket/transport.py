"""Objects of S3, GCS and Azure, by obstore: its requests run on one thread, with an event loop.

On a loop, because a blocking call of obstore hears no Ctrl-C until it returns. The thread is
started before it is needed: an interpreter that ends starts none, and a save may have to finish
then.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import obstore
from obstore import exceptions

from shoal.checkpoint.bucket.objects import ObjectInfo, PrefixContents, UnclearError
from shoal.checkpoint.store.interface import OpenFile
from shoal.errors import StorageError, UsageError

Value = TypeVar("Value")

PART_BYTES = 8 << 20  # of an upload; each part is retried by itself
_MOST_PARTS = 9000  # services allow 10,000
_SLOWEST_BYTES_S = 128 << 10  # an upload that is slower than this is cut and tried again
_UPLOADS = 8  # parts of one file in flight
_AHEAD_BYTES = 32 << 20  # that a file may be ahead of its upload
_READ_TIMEOUT = timedelta(seconds=30)  # without a byte
_NO_TIMEOUT = timedelta(days=7)  # of a whole request: it would cut slow transfers that go on
_CONNECT_TIMEOUT = timedelta(seconds=10)
_RETRIES = {"max_retries": 10, "retry_timeout": timedelta(seconds=180)}

_ABSENT = (FileNotFoundError, exceptions.NotFoundError)
_CONFLICTS = (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError)
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

    def run(self, request: Callable[[], Awaitable[Value]]) -> Value:
        """Run a request there and return its result; an interrupt cancels it."""
        future = self.start(request)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


@lru_cache(maxsize=1)
def _loop() -> _Loop:
    return _Loop()


def open_stores(address: str, config: dict[str, Any], credentials: Any = None) -> tuple[Any, Any]:
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
    try:
        stores = [
            make(
                address,
                config=config,
                client_options={"read_timeout": limit, **client},
                **options,
            )
            for limit in limits
        ]
    except (exceptions.BaseError, ValueError, TypeError) as error:
        raise UsageError(f"{address}: {first_line(error)}") from error
    return stores[0], stores[1]


class ObstoreObjects:
    """See `Objects`."""

    def __init__(self, url: str, prefix: str, stores: tuple[Any, Any]) -> None:
        """`prefix`: of names, without slashes at its ends; "" is the bucket itself."""
        self._url, self._prefix, self._stores = url, prefix, stores
        self._run = _loop().run

    @property
    def url(self) -> str:
        """See `Objects.url`."""
        return self._url

    def below(self, name: str) -> ObstoreObjects:
        """See `Objects.below`."""
        return ObstoreObjects(f"{self._url}/{name}", self._key(name), self._stores)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def listed(self) -> PrefixContents:
        """See `Objects.listed`."""
        store, prefix = self._stores[0], self._prefix or None
        with self._errors("list", ""):
            found: Any = self._run(lambda: obstore.list_with_delimiter_async(store, prefix))
        folders = (path.rpartition("/")[2] for path in found["common_prefixes"])
        return PrefixContents(sorted(map(_info, found["objects"])), sorted(folders))

    def info(self, name: str) -> ObjectInfo:
        """See `Objects.info`."""
        with self._errors("look at", name):
            return _info(self._run(lambda: obstore.head_async(self._stores[0], self._key(name))))

    def read(self, name: str) -> tuple[bytes, str]:
        """See `Objects.read`."""

        async def get() -> tuple[bytes, str]:
            found = await obstore.get_async(self._stores[0], self._key(name))
            return bytes(await found.bytes_async()), _version(found.meta)

        with self._errors("read", name):
            return self._run(get)

    def read_at(self, name: str, offset: int, into: memoryview) -> int:
        """See `Objects.read_at`."""
        target = into.cast("B")

        async def get() -> int:
            options: Any = {"range": (offset, offset + len(target))}
            found = await obstore.get_async(self._stores[0], self._key(name), options=options)
            data = memoryview(await found.bytes_async())
            target[: len(data)] = data
            return len(data)

        if not len(target):
            return 0
        try:
            with self._errors("read", name):
                return self._run(get)
        except StorageError:
            if self.info(name).bytes <= offset:  # the range begins behind the end
                return 0
            raise

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
        with self._errors("write", name, is_write=True):
            self._run(lambda: obstore.put_async(store, key, data, mode=mode, use_multipart=False))

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """See `Objects.open_new`."""
        return _Upload(self, name, num_bytes)

    def remove(self, names: Iterable[str]) -> None:
        """See `Objects.remove`."""
        keys = [self._key(name) for name in names]
        if not keys:
            return
        with self._errors("remove", ""):
            try:
                self._run(lambda: obstore.delete_async(self._stores[0], keys))
            except _ABSENT:
                for key in keys:
                    self._remove_one(key)

    def _remove_one(self, key: str) -> None:
        with contextlib.suppress(*_ABSENT):
            self._run(lambda: obstore.delete_async(self._stores[0], key))

    def upload(self, name: str, num_bytes: int, parts: AsyncIterator[bytes]) -> Any:
        """Start to write a large object of such parts; return the future of its end."""
        size = max(PART_BYTES, -(-num_bytes // _MOST_PARTS // (1 << 20)) * (1 << 20))
        store, key = self._stores[1], self._key(name)
        return _loop().start(
            lambda: obstore.put_async(store, key, parts, chunk_size=size, max_concurrency=_UPLOADS)
        )

    @contextlib.contextmanager
    def _errors(self, doing: str, name: str, *, is_write: bool = False) -> Any:
        """Convert obstore's errors."""
        try:
            yield
        except _ABSENT as error:
            raise FileNotFoundError(f"{self._url}/{name}") from error
        except _CONFLICTS as error:
            raise FileExistsError(f"{self._url}/{name}") from error
        except exceptions.BaseError as error:
            raise self.error(doing, name, error, is_write=is_write) from error
        except PermissionError as error:
            raise self.error(doing, name, error) from error

    def error(
        self, doing: str, name: str, error: Exception, *, is_write: bool = False
    ) -> StorageError:
        """Return the error of a request that failed."""
        where = f"{self._url}/{name}" if name else self._url
        why = first_line(error)
        kind, hint = StorageError, ""
        if isinstance(error, _REFUSED):
            hint = "\nthese credentials have no right to do that, or none were found"
        elif isinstance(error, exceptions.NotSupportedError | NotImplementedError):
            hint = "\nthis server lacks conditional writes, which a commit needs"
        elif is_write:
            kind = UnclearError
        return kind(f"cannot {doing} {where}: {why}{hint}", path=where)


def first_line(error: Exception) -> str:
    """Return obstore's message without the dump of its values that follows."""
    return " ".join(str(error).partition("\n")[0].split())[:300]


def _info(found: Any) -> ObjectInfo:
    name = found["path"].rpartition("/")[2]
    modified_s = found["last_modified"].timestamp()
    return ObjectInfo(name, found["size"], _version(found), modified_s)


def _version(found: Any) -> str:
    """Return what obstore takes as the condition of an update."""
    marks = {key: found[key] for key in ("e_tag", "version") if found[key] is not None}
    return json.dumps(marks, sort_keys=True)


class _Upload:
    """See `OpenFile`: what is written in any order is uploaded in order, as it comes."""

    def __init__(self, objects: ObstoreObjects, name: str, num_bytes: int) -> None:
        self._objects, self._name, self._num_bytes = objects, name, num_bytes
        self._waiting: dict[int, bytes] = {}  # by offset
        self._held_bytes = 0
        self._next = 0  # offset of the next part
        self._problem: BaseException | None = None
        self._changed = threading.Condition()
        self._came: asyncio.Event | None = None  # of the loop
        self._ended = objects.upload(name, num_bytes, self._parts())
        self._ended.add_done_callback(lambda _: self._notify())

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _parts(self) -> AsyncIterator[bytes]:
        self._came = asyncio.Event()
        while self._next < self._num_bytes:
            with self._changed:
                if self._problem is not None:
                    raise self._problem  # obstore aborts the upload
                part = self._waiting.pop(self._next, None)
                self._came.clear()
            if part is None:
                await self._came.wait()
                continue
            with self._changed:
                self._next += len(part)
                self._held_bytes -= len(part)
                self._changed.notify_all()
            yield part

    def write(self, data: memoryview, offset: int) -> None:
        """See `OpenFile.write`."""
        part = bytes(data.cast("B")[: max(0, self._num_bytes - offset)])
        with self._changed:
            # What comes next is always taken, so that a writer never waits for another one.
            self._changed.wait_for(
                lambda: (
                    self._held_bytes < _AHEAD_BYTES
                    or offset == self._next
                    or self._ended.done()
                    or self._problem is not None
                )
            )
            if part:
                self._waiting[offset] = part
                self._held_bytes += len(part)
        if self._ended.done():
            self._raise_end()
        self._wake()

    def _wake(self) -> None:
        def came() -> None:
            if self._came is not None:
                self._came.set()

        _loop().loop.call_soon_threadsafe(came)

    def _raise_end(self) -> None:
        """Return once the upload has succeeded; raise its error."""
        try:
            self._ended.result()
        except (exceptions.BaseError, OSError) as error:
            raise self._objects.error("write", self._name, error) from error

    def finish(self, num_bytes: int) -> None:
        """See `OpenFile.finish`."""
        self._wake()
        self._raise_end()

    def discard(self) -> None:
        """See `OpenFile.discard`."""
        with self._changed:
            self._problem = self._problem or RuntimeError("the save ended")
            self._waiting.clear()
            self._changed.notify_all()
        self._wake()
        with contextlib.suppress(Exception):  # aborted, or complete
            self._ended.result(_CONNECT_TIMEOUT.total_seconds())
