"""How a job stands, for people at a terminal: from a status document, or from the ledger alone."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hsx.core.amounts import in_words
from hsx.printable import printable
from hsx.progress_view import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

STALE_S: Final = 30.0
"""A document this old is one of a run that hangs; as in `hsx.status.site`."""
_BAR: Final = 30
_GOOD, _WARN, _BAD, _DIM = "green", "yellow", "bold red", "dim"
Row = tuple[str, Text]


def of_document(document: dict[str, Any], now: float, silent: str = "") -> RenderableType:
    """How a run stands.

    Args:
        document: a status document.
        now: Unix seconds.
        silent: why no newer document is there; "" where this one is of now.
    """
    progress, engine, job = document["progress"], document["engine"], document["job"]
    rows: list[Row] = [
        ("", _bar(progress["tokens"].get("committed", 0), progress["tokens"].get("total"))),
        ("committed", Text(_amounts(progress))),
        ("rate", Text(_rates(progress))),
        ("left", Text(_left(progress["eta"], now))),
        ("engine", _engine(engine, document.get("restart_budget"), now)),
        ("in flight", Text(_in_flight(document))),
        *(("paused", _text(pause["message"], _BAD)) for pause in document["intake"]["pauses"]),
        *_named("roots", [_root(name, root) for name, root in document["roots"].items()]),
        ("quarantine", _quarantine(document["quarantine"])),
        ("violations", _violations(document["invariants"])),
    ]
    if document["canaries"]["time"] is not None:
        rows.append(
            ("canaries", Text(f"{document['canaries']['passed']} passed, the last {_ago(document['canaries']['time'], now)}"))
        )
    if revoked := progress["samples"]["revoked_by_run"]:
        rows.append(("revoked", _text(f"{_count(revoked)} samples, to be extracted again", _WARN)))
    if document["last_errors"]:
        last = document["last_errors"][-1]
        rows.append(("last error", _text(f"{_ago(last['time'], now)}: [{last['kind']}] {last['message']}", _DIM)))
    return Group(_title(document, job, now), *([_text(silent, _BAD)] if silent else []), _grid(rows))


def of_ledger(facts: dict[str, Any], now: float) -> RenderableType:
    """How a job stands by its ledger. Args: `facts`, of `hsx.standing.standing`; `now`, Unix seconds."""
    samples, tokens, job = facts["samples"], facts["tokens"], facts["job"]
    done = not samples["pending"]
    title = Text.assemble((_clean(job["name"]), "bold"), "  ", ("complete", _GOOD) if done else ("not complete", _WARN))
    title.append(f"  run {job['run']}", _DIM)
    said = f"hsx was not asked: {facts['why']}. This is what the ledger says"
    said += f"; {facts['held_by']} holds the job" if facts["held_by"] else ""
    counted = [f"{_count(samples['committed'])} of {_count(samples['total'])} samples"]
    counted += [f"{_count(tokens['committed'])} of {_count(tokens['total'])} tokens", in_words(facts["bytes"]["committed"])]
    if samples["shared"]:
        counted.append(f"{_count(samples['shared'])} samples share another one's shard ({in_words(facts['bytes']['shared'])})")
    rows: list[Row] = [
        ("", _bar(tokens["committed"], tokens["total"])),
        ("committed", Text(", ".join(counted))),
        ("pending", Text(_count(samples["pending"]))),
    ]
    if facts["last_commit"] is not None:
        rows.append(("last commit", Text(f"{_ago(facts['last_commit'], now)}, {_time(facts['last_commit'])}")))
    lost = {"count": samples["quarantined"], "rejected_rows": samples["rejected_rows"], **facts["quarantine"]}
    violations, epochs = facts["violations"], facts["epochs"]
    named = {"by_name": violations["by_name"], "violations": violations["total"]}
    rows += [
        *_named("roots", [_place(name, root) for name, root in facts["roots"].items()]),
        ("quarantine", _quarantine(lost)),
        ("violations", _violations({"job": named, **named})),
        ("epochs", Text(f"{epochs['total']}, {epochs['ended']} of them given up")),
        *(("", _epoch(epoch, now)) for epoch in epochs["last"]),
    ]
    for one in facts["revocations"]["last"]:
        text = f"{_ago(one['time'], now)}: {_count(one['samples'])} samples, {one['invariant']}: {one['evidence']}"
        rows.append(("revoked", _text(text, _WARN)))
    return Group(title, _text(said, _WARN), _grid(rows))


def line_of_ledger(facts: dict[str, Any]) -> str:
    """The same in one line, as `hsx.progress_view.summary_line` for a document."""
    samples = facts["samples"]
    words = [f"ledger alone ({facts['why']}): samples {samples['committed']}/{samples['total']}"]
    words += [f"quarantined {samples['quarantined']}"] if samples["quarantined"] else []
    words += [f"violations {facts['violations']['total']}"] if facts["violations"]["total"] else []
    return _clean(", ".join(words))


def _title(document: dict[str, Any], job: dict[str, Any], now: float) -> Text:
    phase, health, age = document["phase"], document["health"], now - document["time"]
    style = {"failed": _BAD, "interrupted": _WARN, "draining": _WARN, "done": _GOOD}.get(phase["name"], "")
    title = Text.assemble((_clean(job.get("name", "hsx")), "bold"), "  ", (phase["name"], style))
    if phase["name"] in ("failed", "interrupted", "draining") and phase["reason"]:
        title.append(_clean(f": [{phase['kind']}] {phase['reason']}" if phase["kind"] else f": {phase['reason']}"), style)
    if not health["ok"]:
        title.append(f"  NOT SOUND: {_clean(health['reason'])}", _BAD)
    elif age >= STALE_S and phase["name"] not in ("done", "interrupted", "failed"):
        title.append(f"  hsx has said nothing for {duration(age)}", _BAD)
    title.append(f"  run {job.get('run', '')}, since {duration(job['seconds'])}", _DIM)
    return title


def _bar(done: int, total: int | None) -> Text:
    if not total:
        return Text("the job's size is not known yet", _DIM)
    share = min(1.0, done / total)
    filled = int(share * _BAR)
    # Never 100 % before the last token.
    percent = "100 %" if done >= total else f"{min(99.9, share * 100):.1f} %"
    return Text.assemble(("█" * filled, _GOOD), ("░" * (_BAR - filled), _DIM), f"  {percent}")


def _amounts(progress: dict[str, Any]) -> str:
    samples, tokens = progress["samples"], progress["tokens"]
    words = [f"{_count(samples.get('committed', samples['committed_by_run']))} of {_count(samples.get('total'))} samples"]
    words.append(f"{_count(tokens.get('committed', tokens['committed_by_run']))} of {_count(tokens.get('total'))} tokens")
    words.append(in_words(progress["bytes"].get("committed", progress["bytes"]["committed_by_run"])))
    if shared := progress["shared"].get("samples"):
        words.append(f"{_count(shared)} samples share another one's shard")
    return ", ".join(words)


def _rates(progress: dict[str, Any]) -> str:
    tokens, nbytes = progress["tokens"]["per_second"], progress["bytes"]["per_second"]
    rates = f"{_count(round(tokens['minute']))} tokens/s in the last minute, {_count(round(tokens['ten_minutes']))} in ten"
    return f"{rates}, {_count(round(tokens['run']))} in the run; {in_words(round(nbytes['minute']))}/s"


def _left(eta: dict[str, Any], now: float) -> str:
    if eta["seconds"] is None:
        return f"not known: {eta['basis']}"
    if not eta["seconds"]:
        return "nothing"
    return f"{duration(eta['seconds'])}, until {_time(now + eta['seconds'])} ({eta['basis']})"


def _engine(engine: dict[str, Any], budget: dict[str, Any] | None, now: float) -> Text:
    style = {"READY": _GOOD, "FAILED": _BAD, "BACKOFF": _BAD, "STARTING": _WARN}.get(engine["state"], "")
    text = Text.assemble((engine["state"], style), f" for {duration(max(0.0, now - engine['since']))}")
    if why := engine["waiting_for"] or (engine["reason"] if engine["state"] != "READY" else ""):
        text.append(f": {_clean(why)}")
    if epoch := engine["epoch"]["id"]:
        text.append(f"; epoch {_clean(epoch)[:8]}", _DIM)
    restarts = engine["restarts"]
    if restarts["total"]:
        last = restarts["last"][-1]
        text.append(f"; restarts {restarts['total']}", _WARN)
        text.append(f", the last {_ago(last['time'], now)}: {_clean(last['reason'])}: {_clean(last['evidence'])}")
        if budget:
            text.append(f"; {budget['left']} of {budget['allowed']} left", _BAD if budget["left"] <= 1 else "")
    return text


def _in_flight(document: dict[str, Any]) -> str:
    flight, limits, staging = document["in_flight"], document.get("limits", {}), document["staging"]["bytes"]

    def of(amount: str, limit: str) -> str:
        return f"{amount} of {limit}" if limit else amount

    requests = of(_count(flight["requests"]), _count(limits["requests"]) if "requests" in limits else "")
    tokens = of(_count(flight["tokens"]), _count(limits["tokens"]) if "tokens" in limits else "")
    dumps = of(in_words(staging), in_words(limits["staging_bytes"]) if "staging_bytes" in limits else "")
    return f"{requests} requests, {tokens} tokens; staging {dumps}"


def _root(name: str, root: dict[str, Any]) -> Text:
    state = root["state"].replace("_", " ")
    text = Text.assemble(_clean(name), "  ", (state, _GOOD if root["state"] == "in_service" else _BAD))
    for word, key in (("free", "free_bytes"), ("room", "room_bytes")):
        if root[key] is not None:
            text.append(f", {in_words(root[key])} {word}")
    text.append(f", {_count(root['by_run']['samples'])} samples by this run")
    if root["reason"]:
        text.append(f": {_clean(root['reason'])}", _BAD)
    return text


def _place(name: str, root: dict[str, Any]) -> Text:
    free = "not there" if root["free_bytes"] is None else f"{in_words(root['free_bytes'])} free"
    kept = "" if root["samples"] is None else f"{_count(root['samples'])} samples, {in_words(root['bytes'])}, "
    return Text.assemble(
        _clean(name), "  ", kept, (free, _BAD if root["free_bytes"] is None else ""), f"  {_clean(root['path'])}"
    )


def _quarantine(lost: dict[str, Any]) -> Text:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(lost["by_reason"].items()))
    text = _text(f"{_count(lost['count'])}: {reasons}", _WARN) if lost["count"] else Text("none")
    if lost["rejected_rows"]:
        text.append(f"; {_count(lost['rejected_rows'])} rows of the dataset rejected")
    return text


def _violations(invariants: dict[str, Any]) -> Text:
    job = invariants["job"]
    if not job["violations"]:
        return Text("none", _GOOD)
    names = ", ".join(f"{name} {count}" for name, count in sorted(job["by_name"].items()))
    return _text(f"{names} in the job, {invariants['violations']} of them in this run", _WARN)


def _epoch(epoch: dict[str, Any], now: float) -> Text:
    text = Text(f"{_clean(epoch['epoch'])[:8]} began {_ago(epoch['began'], now)}")
    if epoch["ended"] is not None:
        evidence = f"given up {_ago(epoch['ended'], now)}: {epoch['reason']}: {epoch['evidence']}"
        text.append(f", {_clean(evidence)}", _WARN)
        if epoch["requeued"]:
            text.append(f"; {_count(epoch['requeued'])} samples went back to the queue")
    return text


def _named(label: str, texts: list[Text]) -> list[Row]:
    return [(label if not number else "", text) for number, text in enumerate(texts)]


def _grid(rows: list[Row]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style=_DIM, min_width=11)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid


def _text(text: str, style: str) -> Text:
    return Text(_clean(text), style)


def _clean(text: str) -> str:
    return printable(" ".join(text.split("\n")), keep="")


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _ago(moment: float, now: float) -> str:
    return f"{duration(max(0.0, now - moment))} ago"


def _time(moment: float) -> str:
    return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M %Z")
