"""The connection of another node's launcher, at that of node 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.runtime.wire.frames import Frame, FrameError, text_field
from shoal.runtime.wire.server_sockets import Connection


class NodeCaller:
    """Hands each frame to the function of its verb. See `server_sockets.Listener`."""

    def __init__(
        self, verbs: Mapping[str, Callable[[Frame], None]], ended: Callable[[str], None]
    ) -> None:
        """`ended`: called with the reason when the connection ends."""
        self._verbs, self._ended = verbs, ended

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Handle a frame of a launcher that has joined."""
        verb = text_field(frame.header, "do")
        if verb not in self._verbs:
            raise FrameError(f"{verb[:40]!r} of a launcher")
        self._verbs[verb](frame)

    def on_end(self, connection: Connection, reason: str) -> None:
        """Handle the end of its connection."""
        self._ended(reason)
