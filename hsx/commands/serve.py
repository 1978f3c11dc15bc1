"""`hsx serve`: becomes the server. Runs in the server's environment: standard library and msgspec only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx.config_load import load
from hsx.serve import serve

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Replaces this process by the server."""
    serve(load(args.job).config, args.rest, args.epoch)
