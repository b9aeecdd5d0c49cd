"""The store at a path."""

from __future__ import annotations

import os
from typing import cast

from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.store.interface import Store
from shoal.paths import local_path

Path = str | os.PathLike[str] | Store


def store_at(path: object, prefix: str) -> Store:
    """Return the store at a path; a store is returned unchanged.

    Args:
      prefix: of messages, such as "save: path='x'".

    Raises:
      UsageError: it is not a path.
    """
    if hasattr(path, "collect_garbage"):
        return cast(Store, path)
    return LocalStore(local_path(path, prefix))
