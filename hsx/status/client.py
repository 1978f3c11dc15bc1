"""Asks a status endpoint how its run stands; the other end of `hsx.status.site`. Standard library, but for the types."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from hsx.errors import RunError
from hsx.status.document import VERSION, StatusDocument

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S: Final = 10.0
"""How long an endpoint may take for a part of its answer; it needs milliseconds."""
SILENCE_S: Final = 40.0
"""How long the stream of events may be silent: it says something every 15 s."""
AGAIN_S: Final = 1.0
LARGEST: Final = 64 << 20
LONGEST_REASON: Final = 500
WHOLE_S: Final = 60.0
"""How long an endpoint may take for all of its answer, however steadily it comes."""


class NobodyListens(RunError):  # noqa: N818 - what it says, not what went wrong
    """Nothing listens on the address: where the address is right, hsx is not running."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask.

    Attributes:
        host: name or address.
        port: of TCP.
        token: "" for none.
        tls: whether a reverse proxy there speaks HTTPS.
        path: of the endpoint's root, without a slash at its end.
    """

    host: str
    port: int
    token: str = ""
    tls: bool = False
    path: str = ""

    @property
    def url(self) -> str:
        """For people, and for the same command."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"

    def connect(self, patience_s: float = PATIENCE_S) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=patience_s)

    @property
    def headers(self) -> dict[str, str]:
        """Of a request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def endpoint_of(url: str, token: str = "") -> Endpoint:
    """The endpoint at `http://HOST:PORT`, or behind a reverse proxy. Raises RunError `usage` where that is no such URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RunError("usage", f"{url!r} is no URL of a status endpoint: {error}") from error
    written = url.isprintable() and " " not in url and parts.path.isascii() and port != 0
    plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or not written:
        raise RunError("usage", f"{url!r} is no URL of a status endpoint; expected one like http://127.0.0.1:8470")
    tls = parts.scheme == "https"
    return Endpoint(parts.hostname, port or (443 if tls else 80), token, tls, parts.path.rstrip("/"))


def ask(endpoint: Endpoint, patience_s: float = PATIENCE_S, whole_s: float = WHOLE_S) -> dict[str, Any]:
    """The status document.

    Args:
        endpoint: where.
        patience_s: seconds that it may be silent.
        whole_s: seconds that its answer may take, from the connection to its last byte.

    Raises:
        NobodyListens: `status_unreachable`: the connection was refused.
        RunError: `status_unreachable`: no whole answer came in time, or hsx has nothing to say yet; `status_refused`: the
            token is missing or wrong, or the name of the host is not one that the endpoint knows itself by; `status_foreign`:
            it is not hsx that answers; `status_version`: the document is of a version that this hsx does not know.
    """
    status, body = _get(endpoint, patience_s, whole_s)
    where = f"the status endpoint {endpoint.url}"
    if status == 401:
        given = "another one than was given" if endpoint.token else "a token"
        raise RunError(
            "status_refused", f"{where} wants {given}; expected status.token_file of its job file, or --token-file with a URL"
        )
    if status == 421:
        raise RunError("status_refused", f"{where} does not know itself by the name {endpoint.host!r}; expected an address")
    if status == 503 and _is_verdict(body):
        raise RunError("status_unreachable", f"{where}: {json.loads(body)['reason'][:LONGEST_REASON]}; expected a document")
    document = _decoded(body) if status == 200 else None
    if document is None or not isinstance(document.get("version"), int):
        found = f"HTTP {status}, {body[:60].decode(errors='backslashreplace')!r}"
        raise RunError("status_foreign", f"{where} gave no status document of hsx but {found}; expected JSON with a version")
    if document["version"] != VERSION:
        raise RunError(
            "status_version",
            f"{where} speaks version {document['version']} of the status document; this hsx knows version {VERSION}: "
            "use the hsx that runs the job, or --json of that one",
        )
    try:
        msgspec.convert(document, StatusDocument)
    except msgspec.ValidationError as error:
        raise RunError("status_foreign", f"{where} gave a document that is none of hsx, version {VERSION}: {error}") from error
    return document


class Farewell:
    """Listens, in a thread of its own, for the last word of a run, which polls would miss: the endpoint goes with it.

    Args:
        endpoint: where; it may be away for a time, and come back.

    Attributes:
        listening: the stream is open.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._said = threading.Event()
        self._closed = threading.Event()
        self._last: dict[str, Any] | None = None
        self.listening = False
        threading.Thread(target=self._listen, name="farewell", daemon=True).start()

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The last status document, once the run has ended; None where it has not within so many seconds."""
        return self._last if self._said.wait(seconds) else None

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed.set()

    def _listen(self) -> None:
        while not (self._closed.is_set() or self._said.is_set()):
            # Whatever goes wrong here goes wrong for the polls too, and they tell.
            with suppress(OSError, http.client.HTTPException, ValueError):
                self._hear()
            self._closed.wait(AGAIN_S)

    def _hear(self) -> None:
        connection = self._endpoint.connect(SILENCE_S)
        try:
            connection.request("GET", f"{self._endpoint.path}/events", headers=self._endpoint.headers)
            answer = connection.getresponse()
            ending = False
            while answer.status == 200 and not self._closed.is_set() and (line := answer.readline(LARGEST)):
                self.listening = True
                if line.startswith(b"data: ") and ending:
                    self._last = _decoded(line[6:])
                    self._said.set()
                    return
                ending = line.strip() == b"event: ended"
        finally:
            self.listening = False
            connection.close()


def _get(endpoint: Endpoint, patience_s: float, whole_s: float) -> tuple[int, bytes]:
    connection = endpoint.connect(patience_s)
    late = threading.Event()
    try:
        connection.connect()
        with _ended_after(whole_s, connection.sock, late):
            connection.request("GET", f"{endpoint.path}/status", headers=endpoint.headers)
            answer = connection.getresponse()
            body = answer.read(LARGEST)
        if answer.length or late.is_set():
            raise EOFError(f"its answer lacks {answer.length or 'some'} bytes")
        return answer.status, body
    except ConnectionRefusedError as error:
        message = f"nobody listens on {endpoint.url}; expected the endpoint of a run"
        raise NobodyListens("status_unreachable", message) from error
    except (OSError, http.client.HTTPException, ValueError, EOFError) as error:
        if late.is_set():
            raise _unreachable(endpoint, f"its answer was not whole after {whole_s:g} s") from error
        # That the connection was closed without a word is a BadStatusLine too.
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
            raise RunError(
                "status_foreign", f"{endpoint.url} does not speak HTTP but {str(error).strip()[:60]!r}; expected hsx"
            ) from error
        silent = f"silent for {patience_s:g} s" if isinstance(error, TimeoutError) else ""
        raise _unreachable(endpoint, silent or str(error) or type(error).__name__) from error
    finally:
        connection.close()


@contextmanager
def _ended_after(seconds: float, stream: socket.socket, late: threading.Event) -> Iterator[None]:
    """Shuts the stream, and sets `late`, where the block takes longer: a socket's own timeout begins anew with each byte."""

    def end() -> None:
        late.set()
        with suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _unreachable(endpoint: Endpoint, why: str) -> RunError:
    return RunError("status_unreachable", f"the status endpoint {endpoint.url} does not answer: {why}; expected a document")


def _is_verdict(body: bytes) -> bool:
    document = _decoded(body)
    return document is not None and isinstance(document.get("reason"), str)


def _decoded(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):  # nested too deeply
        return None
    return document if isinstance(document, dict) else None
