"""The systemd journal, seen from a program that writes lines to a stream which leads there.

A line that begins with `<N>` gets the priority N, and the journal takes the prefix away. Standard library only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""syslog's priorities by log level."""


def leads_to_journal(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the service manager has connected `stream` to the journal: it names the stream's file in JOURNAL_STREAM.

    The variable is inherited by programs whose output goes elsewhere, so the file itself is compared.
    """
    told = (os.environ if environ is None else environ).get("JOURNAL_STREAM", "")
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return told == f"{found.st_dev}:{found.st_ino}"


def with_priority(level: str, text: str) -> str:
    """Every line of `text` with the prefix of a log level; the journal makes an entry of each line."""
    prefix = f"<{PRIORITIES.get(level, PRIORITIES['info'])}>"
    return "\n".join(prefix + line for line in text.split("\n"))
