"""What a person should know before training, in sentences: the report's first lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence; `level` is good, note, warn or bad."""

    level: str
    text: str


def findings(document: dict[str, Any]) -> list[Finding]:
    """All of them, the worst first.

    Args:
        document: of `hsx.report.gather`, with all but its findings.
    """
    found = [*_of_progress(document), *_of_places(document), *_of_trust(document), *_of_states(document)]
    return sorted(found, key=lambda finding: ("bad", "warn", "note", "good").index(finding.level))


def _of_progress(document: dict[str, Any]) -> Iterator[Finding]:
    progress = document["progress"]
    if progress is None:
        yield Finding("warn", "The ledger is not there: what it knows of times, servers, failures and roots is missing here.")
        return
    committed, total, pending, quarantined = (progress[key] for key in ("committed", "total", "pending", "quarantined"))
    if document["state"] == "running":
        yield Finding("note", f"hsx is at work on this job: {pending:,} of {total:,} samples are still to come.")
    elif not committed:
        yield Finding("warn", f"Nothing is committed yet, of {total:,} samples.")
    elif pending:
        yield Finding("warn", f"{pending:,} of {total:,} samples are pending; the same hsx run continues.")
    elif not quarantined:
        yield Finding("good", f"All {total:,} samples are committed.")
    if quarantined:
        yield Finding("warn", f"{quarantined:,} of {total:,} samples are quarantined: they are not in the store.")
    if progress["rejected"]:
        yield Finding("note", f"{progress['rejected']:,} rows of the dataset were rejected and are no samples.")
    last = document["lives"]["last"]
    if last and last[-1]["ended"] is not None and pending and document["state"] != "running":
        yield Finding("bad", f"The last server was voided ({last[-1]['reason']}), and no other one came after it.")


def _of_places(document: dict[str, Any]) -> Iterator[Finding]:
    store = document["job"]["store"]
    if store["error"]:
        yield Finding("bad", f"The store cannot be read: {store['error']}")
    for root in document["roots"]:
        if root["there"] is False:
            held = "its samples" if root["samples"] is None else f"{root['samples']:,} samples"
            yield Finding("bad", f"Root {root['name']} is not there: {held} cannot be read until it is mounted again.")
        elif not root["in_job_file"] and root["samples"]:
            yield Finding("warn", f"Root {root['name']} has {root['samples']:,} samples and is not in the job file.")


def _of_trust(document: dict[str, Any]) -> Iterator[Finding]:
    if document["canaries"] is None:
        return
    unvouched, committed = document["canaries"]["unvouched"], document["progress"]["committed"]
    if unvouched:
        level = "note" if document["state"] == "running" else "warn"
        yield Finding(level, f"No canary vouches yet for {unvouched:,} committed samples; the next hsx run sees to that.")
    elif committed:
        yield Finding("good", "Sound canaries vouch for every committed sample.")
    if document["revocations"]["count"]:
        yield Finding("note", f"{document['revocations']['samples']:,} commits were taken back in the job; see below why.")
    violations = sum(document["invariants"].values())
    if violations:
        yield Finding("note", f"Invariants did not hold {violations:,} times; nothing of that was stored.")


def _of_states(document: dict[str, Any]) -> Iterator[Finding]:
    states = document["states"]
    if states is None:
        return
    lost = len(states["unreadable"])
    if lost:
        yield Finding("bad", f"{lost:,} of the samples that were drawn could not be read: hsx verify reads all of them.")
    if states["not_finite"]:
        yield Finding("bad", f"{states['not_finite']:,} of the rows that were read have a norm that is not finite.")
    if states["read"] and not lost:
        yield Finding("good", f"{states['read']:,} drawn samples were read, and their checksums hold.")
