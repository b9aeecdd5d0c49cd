"""The store at a path."""

from __future__ import annotations

import os
from typing import cast

from shoal.checkpoint.bucket.address import Bucket, is_address, store_of
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.store.interface import Store
from shoal.errors import UsageTypeError
from shoal.paths import local_path

Path = str | os.PathLike[str] | Bucket


def store_at(path: object, prefix: str, call: str = "") -> Store:
    """Return the store at a path, or at the address of a bucket; a store is returned unchanged.

    Args:
      prefix: of messages, such as "save: path='x'".
      call: how to call the function, to be said if the path is none.

    Raises:
      UsageError: it is not a path.
    """
    if isinstance(path, Bucket):
        return store_of(path)
    if hasattr(path, "collect_garbage"):
        return cast(Store, path)
    if isinstance(path, str | bytes | os.PathLike):
        text = os.fsdecode(path)
        if is_address(text):
            return store_of(Bucket(text))
    elif call:
        raise UsageTypeError(f"{prefix} must be a string or a pathlib.Path; write {call}")
    return LocalStore(local_path(path, prefix))
