"""`hsx completion`: a completion script for a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx.commands.output import emit

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    import shtab

    from hsx.cli import build_parser

    emit(shtab.complete(build_parser(), shell=args.shell))
    return 0
