"""The way from the run to the process that serves its status: frames over a socket, one way, which never hold the run up."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Final, NamedTuple

BUFFER_BYTES: Final = 1 << 20
_HEAD: Final = struct.Struct(">cI")

SETTINGS: Final = b"s"
DOCUMENT: Final = b"d"
END: Final = b"e"


class Frame(NamedTuple):
    """One message: `SETTINGS` (JSON), `DOCUMENT` (a status document) or `END` (the last one)."""

    kind: bytes
    body: bytes


class Sender:
    """The run's end. Nothing here blocks: what the other end does not take in time is left out.

    Args:
        channel: a stream socket; owned by this object.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        with suppress(OSError):
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._channel = channel
        self._rest = b""

    def send(self, frame: Frame) -> bool:
        """Sends a frame; False where the one before is not taken yet. Raises OSError where nobody is at the other end."""
        if not self.flush():
            return False
        self._rest = _HEAD.pack(frame.kind, len(frame.body)) + frame.body
        self.flush()
        return True

    def flush(self) -> bool:
        """Sends what is left of the last frame; whether all of it is sent now. Raises as `send`."""
        while self._rest:
            try:
                sent = self._channel.send(self._rest, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._rest = self._rest[sent:]
        return True

    def close(self) -> None:
        """Nothing follows. Idempotent."""
        self._channel.close()


class Receiver:
    """The other end.

    Args:
        channel: a stream socket; made non-blocking.

    Attributes:
        ended: the run's end is closed.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._data = bytearray()
        self.ended = False

    def take(self) -> list[Frame]:
        """The frames that have come; never waits."""
        while not self.ended:
            try:
                data = self._channel.recv(BUFFER_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._data += data
        frames = []
        while len(self._data) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._data)
            if len(self._data) < _HEAD.size + length:
                break
            frames.append(Frame(kind, bytes(self._data[_HEAD.size : _HEAD.size + length])))
            del self._data[: _HEAD.size + length]
        return frames
