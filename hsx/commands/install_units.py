"""`hsx install-units`: writes the units of a job, and what they need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hsx.commands.job import examine
from hsx.commands.output import emit, emit_json
from hsx.config_load import load
from hsx.errors import ConfigError, RunError
from hsx.units_text import Host, files, instance, next_steps, problems

if TYPE_CHECKING:
    import argparse

_HUGE = Path("/sys/kernel/mm/transparent_hugepage")


def run(args: argparse.Namespace) -> int:
    """Writes the files that differ; says of each what became of it, and what is to be done next.

    Raises:
        ConfigError: `config_conflict` where the job cannot run in the units.
        RunError: `units_unwritable` where a file cannot be written; those before it are.
    """
    loaded = load(args.job)
    # Told, and nothing more: the dump directory may be mounted by the very units that are written, and disks come later.
    _, findings = examine(loaded)
    host = Host(python=args.python or sys.executable, user=args.user, huge_pages=_HUGE.is_dir())
    found = problems(loaded, host)
    if found:
        raise ConfigError("config_conflict", found)
    root = Path(args.root)
    done = []
    for place, text in sorted(files(loaded, host).items()):
        path = root / place.relative_to("/")
        what = _state(path, text)
        if what != "unchanged" and not args.dry_run:
            _write(path, text)
        done.append({"path": str(path), "state": what, "text": text})
    steps = next_steps(loaded)
    if args.json:
        emit_json({"instance": instance(loaded), "dry_run": args.dry_run, "files": done, "next": steps})
        return 0
    for file in done:
        emit(f"{file['state']:<10} {file['path']}")
        if args.dry_run and file["state"] != "unchanged":
            emit("".join(f"    {line}\n" for line in file["text"].splitlines()))
    for finding in findings:
        if finding.key != "staging.dump_dir":
            emit(str(finding))
    emit("nothing was written (--dry-run)" if args.dry_run else "next:")
    for step in [] if args.dry_run else steps:
        emit(f"    {step}")
    if loaded.config.engine.ownership == "external":
        emit('hsx will not restart the server (engine.ownership = "external"); "systemd" lets it restart exactly its unit')
    return 0


def _state(path: Path, text: str) -> str:
    try:
        return "unchanged" if path.read_text(encoding="utf-8") == text else "changed"
    except (OSError, UnicodeDecodeError):
        return "changed" if path.exists() else "new"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.chmod(0o644)  # systemd and polkit read them as other users; nothing in them is secret
        part.replace(path)
    except OSError as error:
        raise RunError(
            "units_unwritable", f"{path}: {error.strerror or error}; this takes root, or --root for another place"
        ) from error
