"""What of a job file that was read again takes effect in a run, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.config_load import LoadedConfig, load
from hsx.config_schema import keys
from hsx.reload import CHANGEABLE, changes, with_changes
from hsx.testing.jobs import write_job

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, **sections: dict[str, object]) -> LoadedConfig:
    folder.mkdir(exist_ok=True)
    return load(write_job(folder, dict(sections)))


def test_what_may_change_is_taken_and_the_rest_is_named(tmp_path: Path) -> None:
    old = written(tmp_path)
    new = written(
        tmp_path,
        pipeline={"concurrency": 3, "retries": 9},
        staging={"max_bytes": "65MiB"},
        log={"level": "debug"},
        watchdog={"restart_budget": 1, "grace_s": 5.0},
    )
    found = changes(old, new)
    assert found.taken == {
        "pipeline.concurrency": 3,
        "staging.max_bytes": "65MiB",
        "log.level": "debug",
        "watchdog.restart_budget": 1,
    }
    assert set(found.refused) == {"pipeline.retries", "watchdog.grace_s"}
    together = with_changes(old, new)
    assert together.config.pipeline.concurrency == 3
    assert together.config.pipeline.retries == old.config.pipeline.retries
    assert together.staging_bytes == 65 << 20
    assert changes(together, new).taken == {}


def test_other_roots_are_refused_as_a_whole(tmp_path: Path) -> None:
    old = written(tmp_path)
    new = written(tmp_path, roots=[{"name": "b", "path": "root-b", "reserve": "0B"}])  # type: ignore[arg-type]  # a list of tables
    assert changes(old, new).refused == ("roots",)


def test_nothing_differs(tmp_path: Path) -> None:
    assert not changes(written(tmp_path), written(tmp_path))


@pytest.mark.parametrize("key", CHANGEABLE)
def test_each_key_that_may_change_exists(key: str) -> None:
    assert key in keys()
