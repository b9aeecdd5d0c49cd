"""Interrupts of a thread where Python heeds signals, one place after another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType


class Interrupt:
    """Raises KeyboardInterrupt at a place of this thread, inside code of some modules.

    Places are the beginnings of functions, and the ends of calls of those in C.
    """

    def __init__(self, place: int, modules: tuple[ModuleType, ...]) -> None:
        self.left = place
        self._files = [module.__file__ for module in modules]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count, and raise, inside the block."""
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in self._files:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
