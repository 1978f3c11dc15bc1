"""Writes docs/reliability.md from the fault matrix's rows and what the tests in tests/faults have seen of them.

`make test-faults` runs the tests, which leave one file a row in build/faults, and then this.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hsx.testing.fault_matrix import BASELINE, ENGINES, ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).parent.parent
NOT_RUN: Final = "not run"

_INTRODUCTION: Final = """\
# Reliability

Made by `make test-faults` from what its tests saw; do not edit.

hsx promises: a hidden state is stored under a sample only if it is proved to be that sample's; nothing that was committed is
lost; nothing is stored twice. Each row below is a fault that a test brings about, on purpose, while a job runs; the job then
goes on to its end. After each of them the test has read every stored sample again and compared it with states computed
independently of the server, held the shards on the roots against the ledger (one each, none besides), and the ledger against
what the log had called committed. A result stands here only if all of that held: zero wrong, zero lost, zero twice.

"Reference" is the small server of `hsx.testing` that commits faults on command; "SGLang" is the real SGLang with a small model.
A dash: the fault cannot be brought about there, or says nothing new. Reasons are explained in the
[operator's guide](operations.md)."""


def page(folder: Path) -> str:
    """The page, of the results in `folder`."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    lines = ["| row | fault | what hsx does | reference | SGLang |", "| --- | --- | --- | --- | --- |"]
    for name, row in ROWS.items():
        cells = [told(results.get(f"{name}.{engine}")) if engine in row.engines else "-" for engine in ENGINES]
        lines.append(f"| `{name}` | {row.says} | {row.does} | {' | '.join(cells)} |")
    return "\n\n".join((_INTRODUCTION, "\n".join(lines), baseline(results.get(BASELINE)))) + "\n"


def told(result: dict[str, Any] | None) -> str:
    """One cell."""
    if result is None:
        return NOT_RUN
    words = [f"{result['stored']} of {result['samples']} stored"]
    words += [f"{count} quarantined: `{reason}`" for reason, count in result["quarantined"].items()]
    words += [f"{result['rejected']} rejected"] if result["rejected"] else []
    words += [f"restarts: {result['restarts']}"]
    return "; ".join(words)


def baseline(result: dict[str, Any] | None) -> str:
    """What the script that predicts the counter does in the same story."""
    saw = (
        NOT_RUN
        if result is None
        else f"of {result['stored']} pairs that it stored, {result['wrong']} were wrong, without an error; hsx in the same "
        f"story, on the same server: {result['hsx_stored']} stored, {result['hsx_wrong']} wrong"
    )
    return (
        "## Can this matrix fail?\n\n"
        "The way in which hidden states were extracted before hsx is kept as a test: it predicts the number of the server's "
        f"next dump. In the story of the row `seed_story` {saw}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; returns 1 where a row has no result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "faults")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reliability.md")
    args = parser.parse_args(arguments)
    text = page(args.results)
    args.page.write_text(text, encoding="utf-8")
    missing = text.count(NOT_RUN)
    if missing:
        sys.stderr.write(f"{args.page}: {missing} results are missing\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
