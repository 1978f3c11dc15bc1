"""Writes the generated pages of docs/: the job file's schema and reference, exit codes, and the names to rely on.

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
from hsx.exit_codes import MEANINGS
from hsx.logs import EVENTS
from hsx.metrics import METRICS

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
        "JSON lines carry `event`, `level`, `timestamp` (UTC, ISO 8601) and the fields of the event.",
        _table(("event", "level", "meaning"), [(f"`{name}`", level, text) for name, (level, text) in EVENTS.items()]),
    )


PAGES: Final = {
    "job.schema.json": schema_text,
    "job-file.md": reference,
    "exit-codes.md": exit_codes,
    "names.md": names,
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
