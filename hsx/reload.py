"""What may change in a run: the job file is read again, some keys take effect at once, and the rest is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hsx.config import Config

if TYPE_CHECKING:
    from hsx.config_load import LoadedConfig

CHANGEABLE: Final = (
    "pipeline.concurrency",
    "pipeline.max_tokens_in_flight",
    "staging.max_bytes",
    "watchdog.restart_budget",
    "watchdog.restart_window_s",
    "log.level",
)
"""Keys that take effect without a start."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between the job file as it was read, and as it is.

    Attributes:
        taken: new values by key, of those in `CHANGEABLE`.
        refused: the other keys that differ; `roots` as a whole.
    """

    taken: dict[str, Any]
    refused: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.taken or self.refused)


def changes(old: LoadedConfig, new: LoadedConfig) -> Changes:
    """Compares the resolved settings, defaults included."""
    before, after = _flat(old.config), _flat(new.config)
    differing = [key for key in after if after[key] != before[key]]
    taken = {key: after[key] for key in differing if key in CHANGEABLE}
    return Changes(taken, tuple(key for key in differing if key not in CHANGEABLE))


def with_changes(old: LoadedConfig, new: LoadedConfig) -> LoadedConfig:
    """The job file in force: `old`, with what may change as in `new`."""
    document = msgspec.to_builtins(old.config)
    for key, value in changes(old, new).taken.items():
        section, _, name = key.partition(".")
        document[section][name] = value
    return replace(old, config=msgspec.convert(document, Config), staging_bytes=new.staging_bytes)


def _flat(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, values in msgspec.to_builtins(config).items():
        found |= {f"{section}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {section: values}
    return found
