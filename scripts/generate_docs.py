"""Writes the generated pages of docs/: the job file's schema and reference, exit codes, log events, and the names to rely on.

With --check it writes nothing, and fails where a page is not what it would write.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.config_schema import reference, schema_text
from hsx.core.invariants import INVARIANTS
from hsx.errors import KINDS
from hsx.events import BOUND, EVENTS, NOTHING, Event
from hsx.exit_codes import MEANINGS
from hsx.metrics import METRICS
from hsx.status.schema import schema_text as status_schema_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DOCS: Final = Path(__file__).parent.parent / "docs"
_HEAD: Final = "Made by `scripts/generate_docs.py`; do not edit."


def exit_codes() -> str:
    """docs/exit-codes.md."""
    rows = [(str(code.value), code.name, meaning) for code, meaning in MEANINGS.items()]
    return _page("# Exit codes", _HEAD, "Every command ends with one of these.", _table(("code", "name", "meaning"), rows))


def names() -> str:
    """docs/names.md."""
    return _page(
        "# Names to rely on",
        _HEAD,
        "Kinds, invariants, metrics and events keep their names and meanings, and new ones are added. Messages are for people "
        "and change.",
        "## Error kinds",
        _table(("kind", "means that"), [(f"`{kind}`", meaning) for kind, meaning in KINDS.items()]),
        "## Invariants",
        _table(
            ("invariant", "group", "proves that"), [(f"`{item.name}`", item.group, item.proves) for item in INVARIANTS.values()]
        ),
        "## Metrics",
        _table(("metric", "type", "label", "meaning"), [(f"`{m.name}`", m.kind, m.label, m.text) for m in METRICS]),
        "## Log events",
        "In [events.md](events.md).",
    )


def events() -> str:
    """docs/events.md."""
    ours = [event for event in EVENTS.values() if event.writer == "hsx"]
    servers = [event for event in EVENTS.values() if event.writer == "server"]
    return _page(
        "# Log events",
        _HEAD,
        "hsx logs JSON lines to standard error: to systemd's journal with their priorities (error 3, warning 4, info 6, "
        "debug 7), to a terminal as text. `log.level`, `log.format` and `log.samples_per_second` are keys of the "
        "[job file](job-file.md). No line carries token ids, or anything secret.",
        "Every line carries:",
        _table(("field", "is"), [(f"`{name}`", text) for name, text in BOUND.items()]),
        "Lines of libraries also have `logger`, and their text as `event`.",
        *(_event(event) for event in ours),
        "## In the server's log",
        "The capture plugin writes these, as text, into the log of the server that it runs in.",
        *(_event(event) for event in servers),
    )


def _event(event: Event) -> str:
    parts = [f"### `{event.name}`", f"*{event.level}.* {event.says}"]
    if event.todo != NOTHING:
        parts.append(f"Do: {event.todo[0].lower() if event.todo[1].islower() else event.todo[0]}{event.todo[1:]}")
    if event.fields:
        rows = [(f"`{name}`{' (optional)' if name in event.optional else ''}", text) for name, text in event.fields.items()]
        parts.append(_table(("field", "is"), rows))
    return "\n\n".join(parts)


PAGES: Final = {
    "job.schema.json": schema_text,
    "status.schema.json": status_schema_text,
    "job-file.md": reference,
    "exit-codes.md": exit_codes,
    "names.md": names,
    "events.md": events,
}


def _page(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Writes or checks every page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    stale = []
    for name, page in PAGES.items():
        path = args.docs / name
        if not args.check:
            path.write_text(page(), encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != page():
            stale.append(name)
    if stale:
        sys.stderr.write(f"not current: {', '.join(stale)}; run scripts/generate_docs.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
