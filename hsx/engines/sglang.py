"""The HTTP client of an SGLang server; the reference engine shows the same face.

Errors are translated here, once. What a status says of the prompt is a `SampleError`; what it says of the server, or of what
answers in its place, is an `EngineError`; what it says of hsx itself, a `RunError`:

====================================  ==============================
what happens                          error
====================================  ==============================
400 "Duplicate request ID"            SampleError `request_duplicate`
other 400, 413, 422                   SampleError `request_refused`
503                                   EngineError `server_full`
other 5xx                             SampleError `request_failed`
other statuses (401, 404, ...)        EngineError `server_protocol`
200, aborted before it was prefilled  SampleError `request_failed`
200 without a count                   SampleError `answer_invalid`
200 that is no answer of SGLang's     EngineError `server_protocol`
connection refused or unreachable     EngineError `server_gone`
no file descriptor is left to hsx     RunError `out_of_files`
any other failure of a connection     SampleError `request_failed`
no answer in time                     SampleError `request_timeout`
====================================  ==============================
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from hsx.core.invariants import Answer
from hsx.errors import EngineError, RunError, SampleError
from hsx.records import ServerFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hsx.core.marker import Marker

_REFUSED: Final = frozenset({400, 413, 422})
_NOBODY: Final = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH}
    | {errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL, errno.ETIMEDOUT}
)
"""Why a connection does not come up when there is no server at the other end."""
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_DUPLICATE: Final = "Duplicate request ID"
_MESSAGE_CHARS: Final = 500
_JSON: Final = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the client's connections.

    Attributes:
        concurrency: prefills under way at once; a few connections more are kept for questions and aborts.
        connect_s: longest time for a TCP connection to come up.
        question_s: longest time for an answer to a question about settings, or to an abort.
        keepalive_s: how long an idle connection is kept. Far below the time after which the server closes it (600 s under
            `hsx serve`, else 5 s), because a request sent into a closing connection is lost and looks like a failed prefill.
    """

    concurrency: int = 32
    connect_s: float = 10.0
    question_s: float = 30.0
    keepalive_s: float = 1.0


class SGLangClient:
    """Speaks HTTP to one server; implements `hsx.ports.EngineClient`.

    The session is opened at the first call, on the running loop. Nothing is retried here: a lost request may still be under
    way in the server, and whether it is tried again, under a new marker, is the pipeline's decision.
    """

    def __init__(self, host: str, port: int, limits: Limits | None = None) -> None:
        address = f"[{host}]" if ":" in host else host
        self._base = f"http://{address}:{port}"
        self._limits = limits or Limits()
        self._session: aiohttp.ClientSession | None = None

    async def answers(self) -> bool:
        """See the port. SGLang opens its HTTP port only after the model is loaded; `/health` would run a forward."""
        try:
            await self._ask("/model_info")
        except EngineError:
            return False
        return True

    async def facts(self) -> ServerFacts:
        """See the port."""
        server = await self._ask("/server_info")
        return _facts(server)

    async def prefill(
        self, marker: Marker, input_ids: Sequence[int] | NDArray[np.int32], timeout_s: float, rank: int | None = None
    ) -> Answer:
        """See the port. `SampleError` also has the kind `request_duplicate`: the server still works under this marker."""
        ids = input_ids if isinstance(input_ids, list | tuple) else _tolist(input_ids)
        body = msgspec.json.encode(
            {
                "rid": str(marker),
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
                "stream": False,
                **({} if rank is None else {"routed_dp_rank": rank}),
            }
        )
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._limits.connect_s)
        try:
            async with self._open().post(f"{self._base}/generate", data=body, headers=_JSON, timeout=timeout) as response:
                status, payload = response.status, await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            reason = f"connection to {self._base} could not be made within {self._limits.connect_s:g} s"
            raise SampleError("request_failed", f"{marker}: {reason}") from error
        except TimeoutError as error:
            raise SampleError("request_timeout", f"{marker}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            self._raise_if_out_of_files(error)
            if is_nobody(error):
                raise self._gone(error) from error
            what = "could not be made" if isinstance(error, aiohttp.ClientConnectorError) else "was lost"
            reason = f"connection to {self._base} {what}: {type(error).__name__}: {error}"
            raise SampleError("request_failed", f"{marker}: {reason}") from error
        if status != 200:
            raise _refusal(marker, status, payload)
        return _answer(marker, payload)

    async def abort(self, marker: Marker) -> None:
        """See the port.

        SGLang drops every request whose rid *begins* with the one given. Markers stand that: two that share a prefix up to
        the token count are attempts of one sample with the same number, of which there is only one.
        """
        timeout = aiohttp.ClientTimeout(total=self._limits.question_s, sock_connect=self._limits.connect_s)
        body = msgspec.json.encode({"rid": str(marker)})
        try:
            async with self._open().post(f"{self._base}/abort_request", data=body, headers=_JSON, timeout=timeout) as response:
                await response.read()
        except (aiohttp.ClientError, OSError) as error:
            if is_nobody(error):
                raise self._gone(error) from error

    async def close(self) -> None:
        """See the port."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit of its own: admission has one, which may change in a run.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._limits.keepalive_s, enable_cleanup_closed=False)
            # A proxy from the environment must not come between hsx and its server.
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=True)
        return self._session

    async def _ask(self, path: str) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=self._limits.question_s, sock_connect=self._limits.connect_s)
        try:
            async with self._open().get(self._base + path, timeout=timeout) as response:
                status, payload = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            self._raise_if_out_of_files(error)
            raise self._gone(error) from error
        if status >= 500:
            raise EngineError("server_gone", f"{self._base}{path} answered HTTP {status}; expected 200")
        document = _object(payload)
        if status != 200 or document is None:
            raise EngineError(
                "server_protocol", f"{self._base}{path} answered HTTP {status}, {_shown(payload)}; expected 200 and an object"
            )
        return document

    def _raise_if_out_of_files(self, error: Exception) -> None:
        if _errno(error) in _OUT_OF_FILES:
            raise RunError(
                "out_of_files", f"connection to {self._base} needs a file descriptor and there is none left ({error})"
            ) from error

    def _gone(self, error: Exception) -> EngineError:
        return EngineError("server_gone", f"{self._base} does not answer: {type(error).__name__}: {error}")


def _errno(error: Exception) -> int | None:
    """The operating system's number. None also where a name has several addresses that failed for different reasons."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return cause.errno if isinstance(cause, OSError) else None


def is_nobody(error: Exception) -> bool:
    """Whether there is no server at the other end; a connection that was up and broke says less."""
    if not isinstance(error, aiohttp.ClientConnectorError):
        return False
    return isinstance(error, aiohttp.ClientConnectorDNSError) or _errno(error) is None or _errno(error) in _NOBODY


def _tolist(ids: Sequence[int] | NDArray[np.int32]) -> list[int]:
    # An array of numpy integers is not JSON; tolist gives plain ints at C speed.
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def _refusal(marker: Marker, status: int, payload: bytes) -> SampleError | EngineError:
    message = f"{marker}: server answered HTTP {status}: {_message(payload)}"
    if status in _REFUSED:
        return SampleError("request_duplicate" if _DUPLICATE in message else "request_refused", message)
    if status == 503:
        return EngineError("server_full", message)
    if status >= 500:
        return SampleError("request_failed", message)
    return EngineError("server_protocol", f"{message}; expected 200, 400 or 5xx")


def _answer(marker: Marker, payload: bytes) -> Answer:
    document = _object(payload)
    meta = document.get("meta_info") if document is not None else None
    if not isinstance(meta, dict):
        raise EngineError("server_protocol", f"{marker}: answer is {_shown(payload)}; expected an object with meta_info")
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else None
    if not isinstance(reason, str):
        raise EngineError("server_protocol", f"{marker}: meta_info.finish_reason is {finish!r}; expected an object with type")
    rid = meta.get("id")
    if rid != str(marker):
        raise EngineError("server_protocol", f"{marker}: answer is for request {rid!r}; expected this one")
    if reason == "abort" and "prompt_tokens" not in meta:
        raise SampleError("request_failed", f"{marker}: server aborted the request: {_message(msgspec.json.encode(finish))}")
    counts = []
    for name in ("prompt_tokens", "cached_tokens", "num_retractions"):
        # Absent is not zero: a server that does not say whether it used its cache proves nothing.
        value = meta.get(name)
        if type(value) is not int:
            raise SampleError("answer_invalid", f"{marker}: meta_info.{name} is {value!r}; expected an integer")
        counts.append(value)
    return Answer(prompt_tokens=counts[0], cached_tokens=counts[1], finish_reason=reason, retractions=counts[2])


_UNFIT: Final[tuple[tuple[str, Any, str], ...]] = (
    (
        "disable_radix_cache",
        True,
        "cached tokens would never be prefilled: start it with --disable-radix-cache",
    ),
    ("pp_size", 1, "only the last pipeline stage's layers would be captured: start it with --pp-size 1"),
    ("speculative_algorithm", None, "drafts would run through the captured layers: start it without --speculative-algorithm"),
    ("allow_auto_truncate", False, "long prompts would be cut silently: start it without --allow-auto-truncate"),
    ("disaggregation_mode", "null", "prefill and decode would be split: start it without --disaggregation-mode"),
)
"""Server setting, the value it must have, and what else would happen and what to do. A setting that a version does not know is
taken as its fit value, except where its default is unfit: `disable_radix_cache` must be there."""


def _facts(server: dict[str, Any]) -> ServerFacts:
    problems = []
    for name, wanted, remedy in _UNFIT:
        value = server.get(name, False if name == "disable_radix_cache" else wanted)
        if value != wanted:
            problems.append(f"server setting {name} is {value!r}; expected {wanted!r}: {remedy}")
    # The scheduler refuses prompts of max_req_input_len tokens and more. It is below the context length by what the server
    # keeps for itself, and by more where the KV pool is small; so it is read, never computed.
    limit, version, model = server.get("max_req_input_len"), server.get("version"), server.get("model_path")
    if type(limit) is not int or not isinstance(version, str) or not isinstance(model, str):
        raise EngineError(
            "server_protocol",
            f"server_info has max_req_input_len {limit!r}, version {version!r}, model_path {model!r}; "
            "expected an integer and two strings",
        )
    vocab = server.get("vocab_size")
    return ServerFacts(
        engine_version=version,
        model=model,
        max_prompt_tokens=limit - 1,
        vocab_size=vocab if type(vocab) is int else None,
        problems=tuple(problems),
        dp_size=_ranks(server),
    )


def _ranks(server: dict[str, Any]) -> int:
    """Replicas times groups of DP attention, of which one is 1; before `attn_dp_size`, `dp_size` counted either."""
    widths = server.get("dp_size", 1), server.get("attn_dp_size", 1)
    if any(type(width) is not int or width < 1 for width in widths):
        raise EngineError(
            "server_protocol", f"server_info has dp_size {widths[0]!r}, attn_dp_size {widths[1]!r}; expected integers"
        )
    return int(widths[0] * widths[1])


def _object(payload: bytes) -> dict[str, Any] | None:
    try:
        document = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return document if isinstance(document, dict) else None


def _message(payload: bytes) -> str:
    """The server's own words: `error.message`, `message` or `detail`, else the body as it is."""
    document = _object(payload) or {}
    error = document.get("error")
    found = error.get("message") if isinstance(error, dict) else error
    text = found or document.get("message") or document.get("detail")
    return str(text)[:_MESSAGE_CHARS] if text else _shown(payload)


def _shown(payload: bytes) -> str:
    return repr(payload[:_MESSAGE_CHARS].decode("utf-8", "replace"))
