"""The command line. Only the standard library is imported here; the command that is called brings its own imports."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import keyword
import os
import shlex
import sys
import traceback
from typing import TYPE_CHECKING

from hsx import __version__
from hsx.errors import ConfigError, HsxError
from hsx.exit_codes import MEANINGS, ExitCode, of_error
from hsx.export import FORMATS
from hsx.ingest import SOURCES
from hsx.journal import leads_to_journal, with_priority
from hsx.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (see `hsx.exit_codes`). Wrong arguments raise SystemExit(2), as argparse does."""
    if sys.stderr is None:  # closed by whoever started us: nothing that is opened later may take its number
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - open for as long as the process
    given = list(sys.argv[1:] if argv is None else argv)
    # What follows "--" belongs to the server, whatever it looks like; argparse would mix it with our own arguments.
    cut = given.index("--") if "--" in given else len(given)
    parser = build_parser()
    args, unknown = parser.parse_known_args(given[:cut])
    args.rest = given[cut + 1 :]
    if unknown and args.command == "serve":
        moved = shlex.join([*unknown, *args.rest])
        parser.error(f"the server's arguments go after --: hsx serve {shlex.quote(args.job)} -- {moved}")
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.rest and args.command != "serve":
        parser.error(f"{args.command} takes no arguments after --")
    try:
        try:
            return int(importlib.import_module(f"hsx.commands.{_module(args.command)}").run(args))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at the interpreter's exit a reader that went away could only be complained of
    except HsxError as error:
        _report(error, args.verbose)
        return of_error(error)
    except KeyboardInterrupt:
        sys.stderr.write("hsx: interrupted\n")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away; the interpreter must not trip over the same pipe when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.INTERNAL
    except Exception as error:  # noqa: BLE001 - the one place where an unknown fault becomes exit code 1
        missing = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else "hsx"
        if missing != "hsx":
            message = f"the package {missing!r} is not installed in {sys.executable}; hsx {args.command} needs it"
            refused = HsxError("dependency_missing", message)
            _report(refused, args.verbose)
            return of_error(refused)
        traceback.print_exc()
        sys.stderr.write(f"hsx: internal error {type(error).__name__}: {error}; please report it with the traceback above\n")
        return ExitCode.INTERNAL


def _module(command: str) -> str:
    """Name of a command's module; `import` is a word of the language."""
    name = command.replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name


def _report(error: HsxError, verbose: int) -> None:
    if verbose >= 2:
        traceback.print_exception(error)
    lines = [printable(line) for line in error.message.splitlines()] or [""]
    if isinstance(error, ConfigError) and len(lines) > 1:
        lines.insert(0, f"{len(error.problems)} problems:")
    with contextlib.suppress(OSError):  # a full disk under standard error must not change the exit code
        text = f"hsx: error [{error.kind}] " + "\n  ".join(lines)
        sys.stderr.write((with_priority("error", text) if leads_to_journal(sys.stderr) else text) + "\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; also what completions are made from."""
    codes = "\n".join(f"  {code.value:>2}  {MEANINGS[code]}" for code in ExitCode)
    parser = argparse.ArgumentParser(
        prog="hsx",
        description="Extracts hidden states of large models, proved to belong to their samples, into Zarr.",
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hsx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    verbose = argparse.ArgumentParser(add_help=False)
    verbose.add_argument("-v", "--verbose", action="count", default=0, help="log debug events too; twice: tracebacks of errors")
    json = argparse.ArgumentParser(add_help=False)
    json.add_argument("--json", action="store_true", help="print one JSON object to standard output")
    job = argparse.ArgumentParser(add_help=False)
    job.add_argument("job", metavar="JOB", help="the job file (TOML)")

    run = commands.add_parser("run", parents=[job, json, verbose], help="run a job, or continue it")
    run.set_defaults(command="run")
    plan = commands.add_parser("plan", parents=[job, json, verbose], help="say how large a job is, and whether it fits")
    plan.add_argument("--rate", type=_positive, metavar="TOKENS_PER_S", help="prefill rate to reckon the hours with")
    plan.add_argument(
        "--sample",
        metavar="PATH",
        nargs="?",
        const="",
        help="try each storage.codec on states of the model: a store, a dump, a folder of dumps; default: the job's store",
    )
    preview = commands.add_parser(
        "preview", parents=[job, json, verbose], help="show some samples, what counts for the loss in colour, and numbers"
    )
    preview.add_argument(
        "--samples", type=_index, metavar="N", help="how many to show (default: 3; with --id those, with --bad none)"
    )
    preview.add_argument(
        "--rows", type=_count, metavar="N", help="how many rows to read (default: 1000; with --id or --bad as many as needed)"
    )
    preview.add_argument(
        "--id",
        action="append",
        default=[],
        metavar="ID",
        help="show the row of this id, usable or bad; may be given more than once",
    )
    preview.add_argument("--bad", action="store_true", help="list the bad rows, with what is wrong with each")
    preview.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    check = commands.add_parser("check", parents=[json, verbose], help="check a job file and print it resolved")
    check.add_argument("job", metavar="JOB", nargs="?", help="the job file (TOML)")
    check.add_argument("--schema", action="store_true", help="print the job file's JSON Schema, for editors, and end")
    serve = commands.add_parser(
        "serve",
        parents=[job, verbose],
        help="become the server that the job needs; arguments after -- are the server's own",
        usage="hsx serve [-h] [--epoch UUID] [-v] JOB [-- SERVER_ARGUMENT ...]",
    )
    serve.add_argument("--epoch", metavar="UUID", help="name of this server life; default: a new one")
    verify = commands.add_parser("verify", parents=[json, verbose], help="re-read and prove what is stored")
    verify.add_argument("job", metavar="JOB", nargs="?", help="the job file (TOML)")
    verify.add_argument("--store", metavar="PATH", help="verify this store, without its job file and ledger")
    verify.add_argument(
        "--fraction", type=_fraction, default=1.0, metavar="F", help="share of the samples to read (default: 1)"
    )
    verify.add_argument("--against-hf", metavar="MODEL", help="recompute some samples with transformers from this model folder")
    verify.add_argument("--hf-samples", type=_count, default=4, metavar="N", help="how many to recompute (default: 4)")
    verify.add_argument(
        "--tolerance",
        type=_positive,
        metavar="E",
        help="largest relative error of a token for --against-hf (default: 2^-7, for a server in float32; in bf16 try 0.1)",
    )
    verify.add_argument("--seed", type=int, default=0, metavar="N", help="which samples are chosen (default: 0)")
    verify.add_argument(
        "--since",
        metavar="WHEN",
        help="only what was committed since: 12h, 3d, an ISO time, or `last`, the last sound one",
    )
    verify.add_argument("--resume", action="store_true", help="go on with a verification that was cut short")
    verify.add_argument(
        "--cold",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read from the disks, not from the kernel's cache (default)",
    )
    verify.add_argument(
        "--root",
        action="append",
        type=_root,
        default=[],
        metavar="NAME=PATH",
        help="where a root is mounted now, if not where the store has it",
    )
    verify.add_argument("--threads", type=_count, default=2, metavar="N", help="threads of each root that compute (default: 2)")
    seal = commands.add_parser(
        "seal", parents=[job, json, verbose], help="prove a finished store, list its checksums, and let nothing change it"
    )
    seal.add_argument("--partial", action="store_true", help="seal what is there, though samples are pending or in doubt")
    seal.add_argument("--no-verify", action="store_true", help="look for each shard, and read none")
    seal.add_argument("--undo", action="store_true", help="take the seal away")
    show = commands.add_parser("show", parents=[job, json, verbose], help="show one sample: ids, norms, where it lies")
    show.add_argument("sample", metavar="SAMPLE", help="id or index of the sample; what is both is taken as an id")
    key = show.add_mutually_exclusive_group()
    key.add_argument("--id", dest="by", action="store_const", const="id", default="either", help="SAMPLE is an id")
    key.add_argument("--index", dest="by", action="store_const", const="index", default="either", help="SAMPLE is an index")
    quarantine = commands.add_parser("quarantine", help="list quarantined samples, or give them another chance")
    actions = quarantine.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", parents=[job, json, verbose], help="list quarantined samples with reason and evidence")
    listing.add_argument("--rejected", action="store_true", help="list the rows of the dataset that were rejected, too")
    requeue = actions.add_parser("requeue", parents=[job, json, verbose], help="let the next run try samples again")
    requeue.add_argument("indices", metavar="INDEX", nargs="*", type=_index, help="indices of samples, as `list` prints them")
    requeue.add_argument("--all", action="store_true", help="all quarantined samples")
    move = commands.add_parser(
        "move", parents=[job, json, verbose], help="move what lies on one root to others, so that its disk can be taken out"
    )
    move.add_argument("root", metavar="ROOT", help="the root to drain; it takes no new shards from now on")
    move.add_argument("--to", metavar="A,B", help="the roots that take its samples; default: all others of the job file")
    move.add_argument("--dry-run", action="store_true", help="say what would be moved, and whether there is room")
    move.add_argument("--cancel", action="store_true", help="end a move of this root; it takes shards again")
    repair = commands.add_parser(
        "repair", parents=[job, json, verbose], help="have damaged and lost samples extracted again; build a lost ledger again"
    )
    repair.add_argument("--dry-run", action="store_true", help="change nothing, and say what would be done")
    repair.add_argument("--report", metavar="FILE", help="write one line of JSON for each damage, and what became of it")
    repair.add_argument(
        "--lost",
        metavar="ROOT",
        action="append",
        default=[],
        help="this root is gone for good: its samples are extracted again; may be given more than once",
    )
    repair.add_argument(
        "--rebuild-ledger", action="store_true", help="build a missing or broken ledger again, from the shards and its copies"
    )
    invariants = commands.add_parser(
        "invariants", parents=[json, verbose], help="list what is proved of each state, what follows, and how often it fired"
    )
    invariants.add_argument("job", metavar="JOB", nargs="?", help="the job file (TOML); default: hsx's own defaults, no counts")
    report = commands.add_parser(
        "report", parents=[job, verbose], help="write one page on what was stored, to look at before training"
    )
    report.add_argument("-o", "--output", metavar="FILE", help="where to; default: JOB-NAME.report.html in this folder")
    report.add_argument(
        "--samples", type=_drawn, default=64, metavar="N", help="committed samples to draw and read states of (default: 64)"
    )
    report.add_argument("--seed", type=int, default=0, metavar="N", help="which samples are drawn (default: 0)")
    units = commands.add_parser(
        "install-units", parents=[job, json, verbose], help="write the systemd units of a job, and what they need"
    )
    units.add_argument("--dry-run", action="store_true", help="write nothing, and print what would be written")
    units.add_argument("--root", default="/", metavar="FOLDER", help="write below this folder, for an image (default: /)")
    units.add_argument("--user", default="hsx", help="user and group of the units (default: hsx)")
    units.add_argument("--python", default="", metavar="PATH", help="interpreter that has hsx; default: this one")
    status = commands.add_parser(
        "status", parents=[json, verbose], help="say how a run stands; or its job, by the ledger alone"
    )
    status.add_argument(
        "job", metavar="URL|JOB", nargs="?", default="job.toml", help="a status endpoint, or a job file (default: job.toml)"
    )
    status.add_argument("--watch", metavar="SECONDS", nargs="?", const="2", help="again and again (2), until the run ends")
    status.add_argument(
        "--token-file", metavar="PATH", default="", help="file with the endpoint's token; default: the job file's"
    )
    export = commands.add_parser(
        "export",
        parents=[json, verbose],
        help="write a store's samples as the files that a trainer reads",
        epilog="formats:\n" + "\n".join(f"  {name:<18}{meaning}" for name, meaning in FORMATS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.add_argument("store", metavar="STORE", help="the store")
    export.add_argument("folder", metavar="FOLDER", help="where to: a new folder, or one in which this export was cut short")
    export.add_argument("--to", required=True, choices=tuple(FORMATS), metavar="FORMAT", help="the trainer's format, see below")
    export.add_argument("--layers", type=_layers, metavar="K,K", help="the k of the layers h_k to take, rising (default: all)")
    export.add_argument(
        "--final",
        choices=("post_norm", "pre_norm"),
        help="the final state, for modelopt and safetensors (default: as it is stored)",
    )
    export.add_argument(
        "--ids", metavar="FILE", help="only the samples whose ids are in this file, one a line; - reads standard input"
    )
    export.add_argument("--max-tokens", type=_count, metavar="N", help="leave out samples of more than N tokens")
    export.add_argument(
        "--shard", type=_part, default=(0, 1), metavar="I/N", help="write part I of N, counted from 0, into the same folder"
    )
    export.add_argument(
        "--draft-vocab", type=_count, metavar="N", help="map the N most frequent tokens, where the format has that"
    )
    export.add_argument("--vocab-size", type=_count, metavar="N", help="the model's vocabulary (default: its config.json's)")
    export.add_argument("--link", action="store_true", help="make files of equal bytes hard links of one")
    export.add_argument("--threads", type=_count, default=2, metavar="N", help="reading and writing threads (default: 2)")
    export.add_argument(
        "--root",
        action="append",
        type=_root,
        default=[],
        metavar="NAME=PATH",
        help="where a root is mounted now, if not where the store has it",
    )
    export.add_argument(
        "--index-only", action="store_true", help="write ids and masks and no states, for trainers that read the store"
    )
    export.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
    imports = commands.add_parser(
        "import",
        parents=[json, verbose],
        help="make a store of hidden states that others have extracted, as far as they are sound",
        epilog="kinds:\n" + "\n".join(f"  {name:<18}{meaning}" for name, meaning in SOURCES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    imports.add_argument("folder", metavar="FOLDER", help="the folder")
    imports.add_argument("store", metavar="STORE", help="the store to make; must not exist")
    imports.add_argument(
        "--from", dest="kind", required=True, choices=tuple(SOURCES), metavar="KIND", help="what it is, see below"
    )
    imports.add_argument(
        "--layers",
        type=_layers,
        metavar="K,K",
        help="the k of the layers h_k in the files (default: as hsx's manifest there says)",
    )
    imports.add_argument(
        "--final", choices=("post_norm", "pre_norm"), help="the final state in the files (default: the kind's own)"
    )
    imports.add_argument("--threads", type=_count, default=2, metavar="N", help="reading and writing threads (default: 2)")
    imports.add_argument(
        "--root",
        action="append",
        type=_root,
        default=[],
        metavar="NAME=PATH",
        help="a folder, on a disk of its own, that takes shards; may be given more than once (default: STORE.root)",
    )
    completion = commands.add_parser("completion", parents=[verbose], help="print a completion script for a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # whose usage is printed where an argument is unknown
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text}; expected a number above 0")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"is {text}; expected a number above 0 and up to 1")
    return value


def _root(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected the name of a root and its path: NAME=PATH")
    return name, path


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part.strip().removeprefix("h_")) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected the k of layers h_k, such as 2,18,33") from None


def _part(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected I/N with I from 0 to N - 1")
    return int(part), int(parts)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {text}; expected at least 1")
    return value


def _drawn(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 4096:
        raise argparse.ArgumentTypeError(f"is {text}; expected 1 to 4096")
    return value


def _index(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"is {text}; expected the index of a sample, from 0")
    return value
