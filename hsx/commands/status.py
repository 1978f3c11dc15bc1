"""`hsx status`: how a run stands, as its endpoint says it; by the ledger alone where hsx does not run."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console
from rich.live import Live

from hsx.commands.job import require_begun
from hsx.commands.output import emit, emit_json
from hsx.config_load import LoadedConfig, load
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.progress_view import summary_line
from hsx.standing import standing
from hsx.status.client import Endpoint, Farewell, NobodyListens, ask, endpoint_of
from hsx.status.token import read_token
from hsx.status_view import line_of_ledger, of_document, of_ledger

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from rich.console import RenderableType

DEFAULT_JOB: Final = "job.toml"
EVERY_S: Final = 2.0
LONGEST_S: Final = 86400.0
_WIDE: Final = 1000
_ADDRESS: Final = re.compile(r"[\w.\[\]:-]{1,200}:\d{1,5}")
_ENDED = ("done", "interrupted", "failed")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look brought.

    Attributes:
        document: of the endpoint; None where there is none.
        facts: of the ledger, where that was read in its place.
        silent: why `document` is an old one; "" where it is not.
    """

    document: dict[str, Any] | None = None
    facts: dict[str, Any] | None = None
    silent: str = ""


def run(args: argparse.Namespace) -> int:
    """Shows it once, or until the run ends."""
    where, every = _arguments(args.job, args.watch)
    look, endpoint = looker(where, args.token_file)
    if every is None:
        seen = look(None)
        if args.json:
            emit_json(seen.facts if seen.document is None else seen.document)
        else:
            _print(view(seen))
        return code_of(seen)
    return _watch(look, endpoint, every, as_json=args.json)


def _arguments(where: str, watch: str | None) -> tuple[str, float | None]:
    """Where to look, and how often. In `hsx status --watch job.toml` argparse takes the job file for the seconds."""
    if watch is None:
        return where, None
    try:
        every = float(watch)
    except ValueError:
        if where != DEFAULT_JOB:
            raise RunError("usage", f"--watch is {watch!r}; expected a number of seconds above 0") from None
        return watch, EVERY_S
    if not 0 < every <= LONGEST_S:
        raise RunError("usage", f"--watch is {watch}; expected a number of seconds above 0, and up to {LONGEST_S:g}")
    return where, every


def looker(where: str, token_file: str) -> tuple[Callable[[Seen | None], Seen], Endpoint | None]:
    """What looks once, given what was seen before; and the endpoint, where there is one to ask.

    Args:
        where: a URL, or the path of a job file.
        token_file: of a token, for a URL; the job file's own otherwise.

    Raises:
        RunError: `usage` and `status_failed` of URL and token, ConfigError of the job file; see `hsx.status.client.ask` and
            `hsx.standing.standing` for what a look raises.
    """
    if "://" in where:
        endpoint = endpoint_of(where, read_token(token_file, {}, "--token-file"))

        def look(before: Seen | None) -> Seen:
            try:
                return Seen(ask(endpoint))
            except RunError as error:
                if before is None or error.kind != "status_unreachable":
                    raise
                return Seen(before.document, silent=error.message)

        return look, endpoint
    if _ADDRESS.fullmatch(where) and not Path(where).exists():
        raise RunError("usage", f"{where!r} is neither a job file nor a URL; expected one like http://127.0.0.1:8470")
    loaded = load(where)
    endpoint_or_why = _endpoint(loaded, token_file)

    def look_at_job(before: Seen | None) -> Seen:
        if isinstance(endpoint_or_why, str):
            return _by_ledger(loaded, endpoint_or_why, before)
        try:
            document = ask(endpoint_or_why)
        except NobodyListens as error:
            return _by_ledger(loaded, error.message.partition(";")[0], before)
        except RunError as error:
            if before is None or before.document is None or error.kind != "status_unreachable":
                raise
            return Seen(before.document, silent=error.message)
        store = document["job"].get("store", str(loaded.store))
        if store != str(loaded.store):
            other = document["job"].get("name", store)
            return _by_ledger(loaded, f"the job that runs at {endpoint_or_why.url} is another one, {other}", before)
        return Seen(document)

    return look_at_job, None if isinstance(endpoint_or_why, str) else endpoint_or_why


def _endpoint(loaded: LoadedConfig, token_file: str) -> Endpoint | str:
    """Where a job's run is asked, or why it cannot be."""
    settings = loaded.config.status
    if not settings.enabled:
        return "status.enabled is false"
    if not settings.port:
        return "status.port is 0, so that only the log (`status.listening`) knows the URL to give"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - compared, not bound
    token = read_token(token_file, {}, "--token-file") if token_file else read_token(settings.token_file, os.environ)
    return Endpoint(host, settings.port, token)


def _by_ledger(loaded: LoadedConfig, why: str, before: Seen | None) -> Seen:
    require_begun(loaded)
    return Seen(facts=standing(loaded, why, places=before is None or before.facts is None))


def view(seen: Seen) -> RenderableType:
    """For people."""
    if seen.document is not None:
        return of_document(seen.document, time.time(), seen.silent)
    assert seen.facts is not None
    return of_ledger(seen.facts, time.time())


def line(seen: Seen) -> str:
    """The same in one line."""
    if seen.document is not None:
        silent = f"silent: {seen.silent}; " if seen.silent else ""
        return f"{silent}{seen.document['phase']['name']}: {summary_line(seen.document)}"
    assert seen.facts is not None
    return line_of_ledger(seen.facts)


def code_of(seen: Seen) -> ExitCode:
    """Whether somebody has to look: not for a sound run, nor for a job that is complete."""
    if seen.document is not None:
        failed = seen.document["phase"]["name"] == "failed" or not seen.document["health"]["ok"]
        return ExitCode.RUN_ERROR if failed or seen.silent else ExitCode.DONE
    assert seen.facts is not None
    left, running = seen.facts["samples"]["pending"], seen.facts["held_by"]
    return ExitCode.INCOMPLETE if left and not running else ExitCode.DONE


def is_over(seen: Seen) -> bool:
    """Whether nothing is to come: the run said that it ended, or the job is complete and nobody works on it."""
    if seen.document is not None:
        return seen.document["phase"]["name"] in _ENDED
    assert seen.facts is not None
    return not seen.facts["samples"]["pending"] and not seen.facts["held_by"]


def _watch(look: Callable[[Seen | None], Seen], endpoint: Endpoint | None, every: float, *, as_json: bool) -> int:
    """Looks again and again, until the run ends or Ctrl-C; the endpoint may go away and come back meanwhile."""
    seen = look(None)
    farewell = Farewell(endpoint) if endpoint else None
    console = Console(file=sys.stdout, highlight=False)
    drawn = not as_json and console.is_terminal
    live = Live(view(seen), console=console, auto_refresh=False, vertical_overflow="crop") if drawn else None
    try:
        if live:
            live.start(refresh=True)
        while True:
            if live:
                live.update(view(seen), refresh=True)
            else:
                _write(seen, as_json=as_json)
            if is_over(seen):
                return code_of(seen)
            last = _pause(farewell, every)
            seen = look(seen) if last is None else Seen(last)
    except KeyboardInterrupt:
        return code_of(seen)
    finally:
        if live:
            live.stop()
        if farewell:
            farewell.close()


def _pause(farewell: Farewell | None, seconds: float) -> dict[str, Any] | None:
    if farewell:
        return farewell.wait(seconds)
    time.sleep(seconds)
    return None


def _write(seen: Seen, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(seen.facts if seen.document is None else seen.document).decode() + "\n")
    else:
        emit(line(seen))
    sys.stdout.flush()


def _print(shown: RenderableType) -> None:
    """On a terminal as wide as that is; elsewhere, lines are as long as they are."""
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        console.print(shown)
        return
    plain = Console(width=_WIDE, highlight=False, color_system=None)
    with plain.capture() as captured:
        plain.print(shown)
    emit("\n".join(text.rstrip() for text in captured.get().splitlines()))
