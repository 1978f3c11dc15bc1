"""The fingerprint of a job: the settings that decide what is stored. A job may only be resumed under the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_KEYS: Final = {"store.chunk_tokens": "storage.chunk_tokens"}
"""How the job file calls what fingerprints call otherwise."""


@dataclass(frozen=True, slots=True)
class Change:
    """One field that differs from the recorded fingerprint; None where a side lacks it."""

    field: str
    recorded: str | None
    current: str | None

    @property
    def key(self) -> str:
        """Its name in the job file."""
        return _KEYS.get(self.field, self.field)

    @property
    def message(self) -> str:
        """What became of it."""
        return f"the job was started with {self.recorded!r}, now it is {self.current!r}"

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


def changes(recorded: Mapping[str, str], current: Mapping[str, str]) -> list[Change]:
    """The fields in which two fingerprints differ, sorted by name; empty when the job is the same."""
    return [
        Change(field, recorded.get(field), current.get(field))
        for field in sorted(recorded.keys() | current.keys())
        if recorded.get(field) != current.get(field)
    ]
