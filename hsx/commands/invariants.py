"""`hsx invariants`: what is proved before a state is stored, what follows where it does not hold, and how often that was."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from hsx.commands.output import emit, emit_json, table
from hsx.config import Engine, Pipeline, Watchdog
from hsx.config_load import load
from hsx.config_schema import field_texts
from hsx.core.invariants import INVARIANTS
from hsx.core.policy import POLICY, Rule
from hsx.exit_codes import ExitCode
from hsx.stores.ledger_reader import EpochRow, LedgerReader, RevocationRow
from hsx.stores.ledger_schema import FILE_NAME

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

JUDGED_BY: Final[dict[str, tuple[str, ...]]] = {
    "published": ("pipeline.dump_deadline_s",),
    "sequence": ("watchdog.violations", "watchdog.violation_window_s"),
    "advancing": ("watchdog.grace_s", "watchdog.slowest_tokens_per_s"),
    "twins": ("watchdog.canary_every", "watchdog.canary_tolerance"),
    "fingerprint": ("watchdog.canary_every", "watchdog.canary_tolerance"),
    "canary": ("watchdog.violations",),
    "request_timeout": ("pipeline.request_slack", "watchdog.grace_s", "watchdog.slowest_tokens_per_s"),
    "server_full": ("pipeline.congestion_s",),
    "server_start_failed": ("engine.start_timeout_s",),
}
"""Keys of the job file that decide whether an invariant holds, or an error is met; the others are exact, and have none."""
FOR_SAMPLE: Final = {
    "retry": ("retry, then quarantine", ("pipeline.retries",)),
    "quarantine": ("quarantine", ()),
    "give back": ("back to the queue", ()),
    "-": ("-", ()),
}
"""What happens to a sample, in words, and the keys that say when."""
FOR_EPOCH: Final = {
    "count": ("counted in the window", ("watchdog.violations", "watchdog.violation_window_s")),
    "test": ("put to the test", ("watchdog.violations",)),
    "void": ("void at once", ("watchdog.restart_budget", "watchdog.restart_window_s")),
    "refuse": ("server refused", ()),
    "-": ("-", ()),
}
"""What happens to an epoch, in words, and the keys that say when."""
_WIDTH: Final = 110


@dataclass(frozen=True, slots=True)
class History:
    """What the ledger of a job says.

    Attributes:
        violations: by invariant.
        failures: failed attempts by invariant or error kind.
        epochs: the lives of the server.
        revocations: what was committed and taken back.
    """

    violations: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    epochs: list[EpochRow] = field(default_factory=list)
    revocations: list[RevocationRow] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Prints the tables, with the values that the job file puts in force and the counts of its ledger where there are any."""
    loaded = load(args.job) if args.job else None
    sections: dict[str, Any] = {"pipeline": Pipeline(), "watchdog": Watchdog(), "engine": Engine()}
    if loaded is not None:
        sections = {"pipeline": loaded.config.pipeline, "watchdog": loaded.config.watchdog, "engine": loaded.config.engine}
    history = _history(loaded.state_dir / FILE_NAME) if loaded is not None else None
    document = describe(_in_force(sections), history)
    if args.json:
        emit_json({"job": loaded.config.job.name if loaded is not None else None, **document})
    else:
        emit(as_text(document))
    return ExitCode.DONE


def _history(ledger: Path) -> History | None:
    """None where the job has not been run yet."""
    if not ledger.exists():
        return None
    with LedgerReader(ledger) as reader:
        return History(reader.violations_by_invariant(), reader.failures_by_reason(), reader.epochs(), reader.revocations())


def keys_of(name: str) -> tuple[str, ...]:
    """The keys that bear on an invariant or an error kind: on its judgement first, then on what follows from it."""
    rule = POLICY[name]
    found = (*JUDGED_BY.get(name, ()), *FOR_SAMPLE[rule.sample][1], *FOR_EPOCH[rule.epoch][1])
    return tuple(dict.fromkeys(found))


def _in_force(sections: dict[str, Any]) -> dict[str, Any]:
    """The value of each key that bears on any rule."""
    named = sorted({key for name in POLICY for key in keys_of(name)})
    return {key: getattr(sections[key.partition(".")[0]], key.partition(".")[2]) for key in named}


def describe(values: dict[str, Any], history: History | None) -> dict[str, Any]:
    """The tables as plain data.

    Args:
        values: what is in force, by key of the job file.
        history: what the job's ledger says; None without one, and then every `fired` is None.
    """

    def row(name: str, fired: dict[str, int] | None) -> dict[str, Any]:
        rule: Rule = POLICY[name]
        return {
            **asdict(rule),
            "thresholds": {key: values[key] for key in keys_of(name)},
            "fired": None if fired is None else fired.get(name, 0),
        }

    violations, failures = (None, None) if history is None else (history.violations, history.failures)
    document: dict[str, Any] = {
        "invariants": [
            {"name": item.name, "group": item.group, "proves": item.proves, **row(item.name, violations)}
            for item in INVARIANTS.values()
        ],
        "error_kinds": [{"kind": kind, **row(kind, failures)} for kind in POLICY if kind not in INVARIANTS],
        "thresholds": values,
        "restarts": None,
        "revocations": None,
    }
    if history is not None:
        document["restarts"] = [asdict(epoch) for epoch in history.epochs if epoch.ended is not None]
        document["revocations"] = [asdict(revocation) for revocation in history.revocations]
    return document


def as_text(document: dict[str, Any]) -> str:
    """The tables for a person."""
    values = document["thresholds"]
    invariants, kinds = document["invariants"], document["error_kinds"]
    parts = [
        table(
            ("invariant", "group", "to the sample", "to the epoch", "fired", "threshold"),
            [(row["name"], row["group"], *_actions(row), _count(row), _limits(row["name"], values)) for row in invariants],
        ),
        _legend(values),
        "What each proves\n" + "\n".join(_entry(row["name"], row["proves"]) for row in invariants),
        "Why this is done\n" + "\n".join(_entry(row["name"], row["because"]) for row in invariants),
        table(
            ("error kind", "to the sample", "to the epoch", "failed", "because"),
            [(row["kind"], *_actions(row), _count(row), row["because"]) for row in kinds],
        ),
        table(("threshold", "in force", "what it is"), [(key, _value(value), _text(key)) for key, value in values.items()]),
    ]
    if document["restarts"]:
        ends = [(_time(row["ended"]), row["reason"], len(row["requeued"]), row["evidence"]) for row in document["restarts"]]
        parts.append(table(("epoch ended", "reason", "requeued", "evidence"), ends))
    if document["revocations"]:
        taken = [(_time(row["at"]), row["invariant"], len(row["samples"]), row["evidence"]) for row in document["revocations"]]
        parts.append(table(("revoked at", "invariant", "samples", "evidence"), taken))
    return "\n\n".join(parts)


def _actions(row: dict[str, Any]) -> tuple[str, str]:
    return FOR_SAMPLE[row["sample"]][0], FOR_EPOCH[row["epoch"]][0]


def _limits(name: str, values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {_value(values[key])}" for key in JUDGED_BY.get(name, ())) or "exact"


def _count(row: dict[str, Any]) -> str:
    return "-" if row["fired"] is None else str(row["fired"])


def _legend(values: dict[str, Any]) -> str:
    count, window = values["watchdog.violations"], _value(values["watchdog.violation_window_s"])
    budget, hours = values["watchdog.restart_budget"], _value(values["watchdog.restart_window_s"])
    lines = (
        ("retry, then quarantine", f"tried again {values['pipeline.retries']} times (pipeline.retries)"),
        ("counted in the window", f"{count} within {window} s void the epoch (watchdog.violations, violation_window_s)"),
        ("put to the test", f"{count} different samples that fail in a row bring a canary; if it fails, the epoch is void"),
        (
            "void at once",
            f"the server is restarted, {budget} times within {hours} s (watchdog.restart_budget, restart_window_s)",
        ),
        ("server refused", "another start would change nothing: the run ends"),
        ("-", "it speaks of no single sample; those in flight go back to the queue, held against nobody"),
    )
    return "\n".join(_entry(word, text) for word, text in lines)


def _entry(name: str, text: str) -> str:
    indent = " " * 26
    return textwrap.fill(text, _WIDTH, initial_indent=f"  {name:<22}  ", subsequent_indent=indent)


def _value(value: float) -> str:
    return f"{value:g}"


def _text(key: str) -> str:
    section, _, name = key.partition(".")
    return field_texts()[section.capitalize(), name]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
