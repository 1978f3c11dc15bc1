"""How a job stands by its ledger alone: what `hsx status` says where no run can be asked."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from hsx.locks import JOB_LOCK, holder_of
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME

if TYPE_CHECKING:
    from hsx.config_load import LoadedConfig

LAST: Final = 5
"""So many epochs, and so many revocations, are told."""


def standing(loaded: LoadedConfig, why: str, *, places: bool = True) -> dict[str, Any]:
    """The facts, as plain data; `source` is "ledger".

    Args:
        loaded: the job file.
        why: why no run was asked.
        places: also what lies on each root, and when the last sample was committed, for which every row is read.

    Raises:
        RunError: `ledger_failed`.
    """
    path = loaded.state_dir / FILE_NAME
    with LedgerReader(path) as ledger:
        counts, reasons, fired = ledger.counts(), ledger.quarantined_by_reason(), ledger.violations_by_invariant()
        epochs, revocations = ledger.epochs(), ledger.revocations()
        kept = ledger.committed_by_root() if places else {}
        run = ledger.run
    roots: dict[str, dict[str, Any]] = {}
    for root in loaded.roots:
        there = kept.get(root.name)
        roots[root.name] = {"path": str(root.path), "samples": there and there.samples, "bytes": there and there.nbytes}
        roots[root.name]["free_bytes"] = None
        with suppress(OSError):
            roots[root.name]["free_bytes"] = shutil.disk_usage(root.path).free
        if places and there is None:
            roots[root.name] |= {"samples": 0, "bytes": 0}
    for name in kept.keys() - roots.keys():
        roots[name] = {"path": "", "samples": kept[name].samples, "bytes": kept[name].nbytes, "free_bytes": None}
    ended = [epoch for epoch in epochs if epoch.ended is not None]
    return {
        "source": "ledger",
        "why": why,
        "held_by": holder_of(loaded.state_dir / JOB_LOCK),
        "time": time.time(),
        "ledger": str(path),
        "job": {"name": loaded.config.job.name, "run": run, "store": str(loaded.store)},
        "samples": {
            "total": counts.pending + counts.committed + counts.quarantined,
            "committed": counts.committed,
            "pending": counts.pending,
            "quarantined": counts.quarantined,
            "shared": counts.shared,
            "rejected_rows": counts.rejected,
        },
        "tokens": {"total": counts.tokens_total, "committed": counts.tokens_committed},
        "bytes": {"committed": counts.bytes_committed, "shared": counts.bytes_shared},
        "last_commit": max((place.last for place in kept.values()), default=None),
        "quarantine": {"by_reason": reasons},
        "violations": {"total": sum(fired.values()), "by_name": fired},
        "roots": roots,
        "epochs": {
            "total": len(epochs),
            "ended": len(ended),
            "last": [
                {
                    "epoch": epoch.epoch,
                    "began": epoch.began,
                    "ended": epoch.ended,
                    "reason": epoch.reason,
                    "evidence": epoch.evidence,
                    "requeued": len(epoch.requeued),
                }
                for epoch in epochs[-LAST:]
            ],
        },
        "revocations": {
            "samples": sum(len(one.samples) for one in revocations),
            "last": [
                {"time": one.at, "invariant": one.invariant, "evidence": one.evidence, "samples": len(one.samples)}
                for one in revocations[-LAST:]
            ],
        },
    }
