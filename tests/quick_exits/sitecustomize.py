"""Python imports this first in the child processes of the suite, for `PYTHONPATH` leads here.

What JAX's import makes lives as long as the process. Without it garbage collection has little to
look at, during the import and, above all, at the end of the process: about a quarter of the
processor time of a process that does little else.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _JaxFinder:
    """Finds JAX, once, and leaves what its import makes out of garbage collection."""

    @staticmethod
    def find_spec(
        name: str, path: None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "jax":
            return None
        sys.meta_path.remove(_JaxFinder)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_freeze(module: ModuleType) -> None:
                gc.disable()
                try:
                    load(module)
                finally:
                    gc.freeze()
                    gc.enable()

            spec.loader.exec_module = load_and_freeze
        return spec


sys.meta_path.insert(0, _JaxFinder)
