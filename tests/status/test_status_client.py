"""What is asked of an endpoint, and what is told where it is none, or not the one that was meant."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from hsx.errors import RunError
from hsx.status import VERSION, StatusServer
from hsx.status.client import Endpoint, Farewell, NobodyListens, ask, endpoint_of
from hsx.telemetry import Telemetry
from hsx.testing.commands import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

Begin = Callable[[StatusServer], Awaitable[str]]
TOKEN = "0123456789abcdef"


@contextmanager
def answering(*answers: bytes) -> Iterator[Endpoint]:
    """A program that sends these bytes, one a connection, whatever it is asked, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Endpoint("127.0.0.1", listening.getsockname()[1])
        thread.join()


def http(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body.encode())}\r\nConnection: close\r\n\r\n{body}".encode()


def document() -> dict[str, Any]:
    return StatusServer(Telemetry(), dict, "127.0.0.1", 0).document()


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (b"220 mail ESMTP\r\n", "status_foreign", r"does not speak HTTP but '220 mail ESMTP'; expected hsx"),
        (http("<html>It works</html>"), "status_foreign", r"no status document of hsx but HTTP 200, '<html>It works"),
        (http('{"a": 1}'), "status_foreign", r"expected JSON with a version"),
        (http("[1]"), "status_foreign", r"expected JSON with a version"),
        (http('{"version": "1"}'), "status_foreign", r"expected JSON with a version"),
        (http('{"version": 1, "a": ' + "[" * 100_000), "status_foreign", r"expected JSON with a version"),
        (http('{"version": ' + "1" * 5000 + "}"), "status_foreign", r"expected JSON with a version"),
        (http(json.dumps({"reason": "x" * 10_000}), "503 x"), "status_unreachable", r": x{500}; expected a document"),
        (http("nothing here", "404 Not Found"), "status_foreign", r"HTTP 404, 'nothing here'"),
        (http(json.dumps({"version": VERSION})), "status_foreign", r"a document that is none of hsx, version 1: .*`time`"),
        (
            http(json.dumps({"version": 99})),
            "status_version",
            r"speaks version 99 of the status document; this hsx knows version 1",
        ),
        (
            http('{"ok": false, "reason": "hsx has not said anything yet"}', "503 x"),
            "status_unreachable",
            "not said anything yet",
        ),
        (http("overloaded", "503 x"), "status_foreign", r"HTTP 503, 'overloaded'"),
        (b"", "status_unreachable", "does not answer: .*closed connection without response; expected a document"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "status_unreachable", "does not answer: its answer lacks 98 bytes"),
        (http("{}", "421 Misdirected"), "status_refused", r"does not know itself by the name '127.0.0.1'; expected an address"),
    ],
)
def test_what_is_no_answer_of_hsx_is_told(answer: bytes, kind: str, says: str) -> None:
    with answering(answer) as endpoint, pytest.raises(RunError, match=says) as caught:
        ask(endpoint, PATIENCE_S, PATIENCE_S)
    assert caught.value.kind == kind
    assert endpoint.url in caught.value.message
    assert not isinstance(caught.value, NobodyListens)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(NobodyListens, match=f"nobody listens on http://127.0.0.1:{port}") as caught:
        ask(Endpoint("127.0.0.1", port))
    assert caught.value.kind == "status_unreachable"


def test_one_that_says_nothing_is_not_waited_for_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RunError, match=r"silent for 0.1 s") as caught:
        ask(Endpoint("127.0.0.1", silent.getsockname()[1]), patience_s=0.1)
    assert caught.value.kind == "status_unreachable"


def test_one_that_answers_byte_by_byte_is_not_listened_to_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.02)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with pytest.raises(RunError, match=r"does not answer: its answer was not whole after 0.5 s") as caught:
            ask(Endpoint("127.0.0.1", listening.getsockname()[1]), patience_s=300, whole_s=0.5)
        assert caught.value.kind == "status_unreachable"
        thread.join()


def test_fields_that_are_newer_than_this_hsx_are_no_fault() -> None:
    newer = {**document(), "later": 1}
    with answering(http(json.dumps(newer))) as endpoint:
        assert ask(endpoint, PATIENCE_S, PATIENCE_S)["later"] == 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8470", Endpoint("127.0.0.1", 8470)),
        ("http://[::1]:8470/", Endpoint("::1", 8470)),
        ("https://proxy/hsx/", Endpoint("proxy", 443, tls=True, path="/hsx")),
    ],
)
def test_urls(url: str, expected: Endpoint) -> None:
    assert endpoint_of(url) == expected
    assert endpoint_of(expected.url) == expected


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://a:1", "http://", "http://a:99999", "http://a:b", "http://u@a:1", "http://a:1/?q=1", "://", "http://a:0"),
        *("http://a b:1", "http://a:1/b c", "http://a:1/\x1b[31m", "http://a:1/\r\nX: y", "http://a:1/\xe9"),
    ],
)
def test_what_is_no_url_of_an_endpoint(url: str) -> None:
    with pytest.raises(RunError, match="is no URL of a status endpoint") as caught:
        endpoint_of(url)
    assert caught.value.kind == "usage"


async def test_the_token(begin: Begin) -> None:
    server = StatusServer(Telemetry(), dict, "127.0.0.1", 0, token=TOKEN)
    url = await begin(server)
    assert (await asyncio.to_thread(ask, endpoint_of(url, TOKEN)))["version"] == VERSION
    for token, wants in (("", "a token"), ("another-of-16-chars", "another one than was given")):
        with pytest.raises(RunError, match=f"wants {wants}; expected status.token_file") as caught:
            await asyncio.to_thread(ask, endpoint_of(url, token))
        assert caught.value.kind == "status_refused"
        assert TOKEN not in caught.value.message
    await server.stop()


async def test_the_last_word_is_heard_after_the_endpoint_went_and_came_back(begin: Begin) -> None:
    server = StatusServer(Telemetry(), dict, "127.0.0.1", 0)
    url = await begin(server)
    farewell = Farewell(endpoint_of(url))
    await asyncio.to_thread(ask, endpoint_of(url))
    server.kill()
    assert farewell.wait(0.1) is None
    await server.stop()
    telemetry = Telemetry()
    again = StatusServer(telemetry, dict, "127.0.0.1", int(url.rpartition(":")[2]), goodbye_s=PATIENCE_S)
    await again.start()
    # The stream is open once its first bytes are there; only then may the run end.
    await asyncio.to_thread(wait_until, lambda: farewell.listening, "the stream is open")
    telemetry.phase("done")
    await again.stop()
    last = await asyncio.to_thread(farewell.wait, 60)
    assert last is not None
    assert last["phase"]["name"] == "done"
    farewell.close()
