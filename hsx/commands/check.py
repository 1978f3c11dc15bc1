"""`hsx check`: is this job file right, and what does it come to?"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from hsx.commands.job import examine
from hsx.commands.output import emit, emit_json
from hsx.commands.toml_text import to_toml
from hsx.config_check import Finding
from hsx.config_load import load
from hsx.config_schema import schema_text
from hsx.datasets import longest_allowed
from hsx.datasets.sniff import sniff
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.prepare import changed_settings
from hsx.printable import printable

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Prints the resolved job file to standard output and the findings to standard error; refused where one is an error."""
    if args.schema:
        sys.stdout.write(schema_text())
        return ExitCode.DONE
    if args.job is None:
        raise RunError("usage", "hsx check needs a job file, or --schema")
    loaded = load(args.job)
    shape, findings = examine(loaded)
    if shape is not None:
        findings += [Finding("error", change.key, change.message) for change in changed_settings(loaded, shape)]
    seen = None
    if all(finding.key != "dataset.path" and finding.key != "dataset.columns" for finding in findings):
        try:
            seen = sniff(loaded.config)
        except RunError as error:
            findings.append(Finding("error", "dataset.path", error.message))
    ok = all(finding.level != "error" for finding in findings)
    config = msgspec.to_builtins(loaded.config)
    if shape is not None:
        config["dataset"]["max_tokens"] = longest_allowed(loaded.config, shape)
    if args.json:
        found = [asdict(finding) for finding in findings]
        emit_json({"ok": ok, "findings": found, "dataset": asdict(seen) if seen else None, "config": config})
    else:
        emit(to_toml(config).rstrip("\n"))
        told = [*(printable(line, keep="") for line in (seen.lines() if seen else ())), *map(str, findings)]
        sys.stderr.write("".join(printable(f"{args.job}: {line}\n") for line in told))
    return ExitCode.DONE if ok else ExitCode.REFUSED
