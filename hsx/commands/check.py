"""`hsx check`: is this job file right, and what does it come to?"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from hsx.commands.job import examine
from hsx.commands.output import emit, emit_json
from hsx.commands.toml_text import to_toml
from hsx.config_load import load
from hsx.config_schema import schema_text
from hsx.datasets import longest_allowed
from hsx.errors import RunError
from hsx.exit_codes import ExitCode

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
    ok = all(finding.level != "error" for finding in findings)
    config = msgspec.to_builtins(loaded.config)
    if shape is not None:
        config["dataset"]["max_tokens"] = longest_allowed(loaded.config, shape)
    if args.json:
        emit_json({"ok": ok, "findings": [asdict(finding) for finding in findings], "config": config})
    else:
        emit(to_toml(config).rstrip("\n"))
        sys.stderr.write("".join(f"{args.job}: {finding}\n" for finding in findings))
    return ExitCode.DONE if ok else ExitCode.REFUSED
