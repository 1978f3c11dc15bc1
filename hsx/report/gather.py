"""Collects what the report says: a document of JSON values, and the arrays that are drawn.

Nothing is locked and nothing is changed. Where a run is at work, the ledger's numbers are of one moment, and the states of
another, a little later.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from hsx import __version__
from hsx.errors import RunError
from hsx.locks import JOB_LOCK, holder_pid
from hsx.report.findings import findings
from hsx.report.lengths import length_facts, stored_lengths
from hsx.report.roots import root_facts
from hsx.report.state_facts import state_facts
from hsx.report.states import DrawnStates, draw_states, memory_bound
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.ledger_summary import LedgerSummary, RootTally
from hsx.stores.reader import Store

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.config_load import LoadedConfig

ROWS: Final = 50
"""Rows of a table on the page at most; what is left out is counted."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """All that the page is made of: `document` as plain data, and what was read of the states, None where nothing could be."""

    document: dict[str, Any]
    drawn: DrawnStates | None


def gather(loaded: LoadedConfig, samples: int, seed: int, now: float | None = None) -> Gathered:
    """Collects everything about a job that was begun.

    Args:
        loaded: the job.
        samples: how many committed samples to draw.
        seed: which ones.
        now: Unix seconds that the page is dated with; default: the time.

    Raises:
        RunError: `ledger_failed` for a ledger that cannot be read. A store that cannot be is part of the report.
    """
    store, store_error = _store(loaded)
    ledger_path = loaded.state_dir / FILE_NAME
    tallies: list[RootTally] | None = None
    facts: dict[str, Any] = dict.fromkeys(
        ("progress", "timeline", "lives", "revocations", "invariants", "failures", "quarantine", "rejected", "canaries")
    )
    fingerprint: dict[str, str] = {}
    run, engine, rows = "", None, None
    if ledger_path.exists():
        with LedgerSummary(ledger_path) as ledger, ledger.snapshot():
            facts, tallies, rows = _ledger_facts(ledger, store), ledger.by_root(), ledger.lengths()
            fingerprint, run, engine = ledger.fingerprint, ledger.run, ledger.fact("engine")
    elif store is not None:
        rows = stored_lengths(store)
    drawn = None if store is None else draw_states(store, samples, seed)
    document: dict[str, Any] = {
        "version": 1,
        "time": time.time() if now is None else now,
        "job": {
            "name": loaded.config.job.name,
            "file": str(loaded.path),
            "run": run,
            "running": holder_pid(loaded.state_dir / JOB_LOCK) > 0,
            "ledger": ledger_path.exists(),
            "store": _store_facts(loaded.store, store, store_error),
            "fingerprint": fingerprint,
            "hsx": __version__,
            "engine": engine,
        },
        **facts,
        "lengths": length_facts(rows or []),
        "roots": root_facts(loaded, store, tallies),
        "states": None
        if drawn is None or store is None
        else state_facts(drawn, store, samples, seed, memory_bound(store, samples)),
    }
    document["state"] = _state(document)
    document["findings"] = [asdict(found) for found in findings(document)]
    return Gathered(document, drawn)


def _store(loaded: LoadedConfig) -> tuple[Store | None, str]:
    try:
        return Store(loaded.store), ""
    except RunError as error:
        return None, f"{error.kind}: {error.message}"


def _store_facts(path: Path, store: Store | None, error: str) -> dict[str, Any]:
    if store is None:
        return {"path": str(path), "error": error}
    info = store.info
    return {
        "path": str(path),
        "error": "",
        "id": info.store_id,
        "format": info.format,
        "samples": info.layout.samples,
        "states": list(info.spec.names),
        "final": info.spec.final,
        "hidden_size": info.layout.hidden_size,
        "codec": info.layout.codec,
        "token_bytes": info.layout.token_bytes,
        "model": dict(info.model),
        "sealed": None if info.sealed is None else dict(info.sealed),
        "visible": len(store.committed),
    }


def _ledger_facts(ledger: LedgerSummary, store: Store | None) -> dict[str, Any]:
    counts, timeline, lives = ledger.counts(), ledger.timeline(), ledger.lives()
    revocations = ledger.taken_back()
    quarantined = list(islice(ledger.quarantined(), ROWS))
    servers = [life for life in lives if not life.stream]
    ended = [life for life in servers if life.ended is not None]
    return {
        "progress": {
            **asdict(counts),
            "total": counts.pending + counts.committed + counts.quarantined,
            "tokens_per_second": ledger.tokens_per_second(),
        },
        "timeline": None if timeline is None else asdict(timeline),
        "lives": {
            "servers": len(servers),
            "ended": len(ended),
            "requeued": sum(life.requeued for life in lives),
            "last": [asdict(life) for life in servers[-ROWS:]],
            "ends": [life.ended for life in ended][-ROWS:],
        },
        "revocations": {
            "count": len(revocations),
            "samples": sum(entry.samples for entry in revocations),
            "last": [asdict(entry) for entry in revocations[-ROWS:]],
        },
        "invariants": ledger.violations_by_invariant(),
        "failures": ledger.failures_by_reason(),
        "quarantine": {
            "count": counts.quarantined,
            "by_reason": ledger.quarantined_by_reason(),
            "first": [{**asdict(row), "id": "" if store is None else _id_of(store, row.index)} for row in quarantined],
        },
        "rejected": {"count": counts.rejected, "by_reason": ledger.rejected_by_reason()},
        "canaries": {
            "sent": int(ledger.fact("canaries") or 0),
            "vouched": sum(life.committed - life.unvouched for life in lives),
            "unvouched": counts.committed - sum(life.committed - life.unvouched for life in lives),
        },
    }


def _id_of(store: Store, index: int) -> str:
    return store.sample_id(index) if index < len(store) else ""


def _state(document: dict[str, Any]) -> str:
    """One word on where the job stands."""
    store, progress = document["job"]["store"], document["progress"]
    if store.get("sealed") is not None:
        return "sealed"
    if document["job"]["running"]:
        return "running"
    if progress is None:
        return "no ledger"
    if not progress["pending"]:
        return "finished"
    return "unfinished" if progress["committed"] else "empty"
