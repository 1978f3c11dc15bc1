"""Whole runs that store less than they capture: the truth, as far as conversion lets it, and every command on such stores."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.config_check import check
from hsx.config_load import load
from hsx.core.layout import shard_key
from hsx.core.spec import ModelShape
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.prepare import prepare
from hsx.stores.group import REDUCED_FORMAT, open_store
from hsx.stores.ledger_backup import BACKUP_NAME
from hsx.stores.reader import Store
from hsx.testing.jobs import write_job
from hsx.testing.promise import committed_rows, damages
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples
from hsx.testing.twin_rows import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.app import Outcome

BOTH: dict[str, Any] = {"tokens": "loss", "dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("storage", "shared"),
    [
        ({"tokens": "loss"}, 1),
        ({"tokens": "loss", "context": 1}, 4),  # every other token, and its neighbours: all
        ({"dtype": "fp8_e4m3"}, 4),
        (BOTH | {"durability": "relaxed", "codec": "zstd"}, 1),
        (BOTH | {"writer": "zarr"}, 1),
    ],
)
async def test_a_run_stores_the_truth(job_of: Callable[..., TinyJob], storage: dict[str, Any], shared: int) -> None:
    job = job_of(**storage)
    outcome = await job.run()
    assert (outcome.committed, outcome.shared, outcome.violations) == (10, shared, {})
    assert wrong_samples(job.loaded) == []
    assert damages(job.loaded) == []
    store = open_store(job.loaded.store)
    assert store.format == REDUCED_FORMAT
    assert (store.layout.kept, store.layout.context) == (storage.get("tokens", "all"), storage.get("context", 0))
    assert store.layout.dtype == storage.get("dtype", "bf16")


def quiet(_rows: int, _tokens: int) -> None:
    """Nobody watches."""


def run(job: TinyJob) -> Outcome:
    """One run against a server of its own, which is gone afterwards."""

    async def served() -> Outcome:
        async with job.server():
            return await job.run()

    return asyncio.run(served())


def test_every_command_holds_on_such_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned, extracted, damaged, repaired, rebuilt from shards, vouched for by another server, moved and sealed."""
    job = make_job(tmp_path, storage=BOTH)
    write_rows(tmp_path)

    def command(*words: str) -> int:
        return main([words[0], str(tmp_path / "job.toml"), *words[1:]])

    assert command("plan", "--json") == ExitCode.DONE
    planned = json.loads(capsys.readouterr().out)
    assert run(job).committed == 10
    rows = committed_rows(job.loaded)
    own = [row for row in rows.values() if row.captured_as == row.index]
    assert planned["file_bytes"] == sum(row.nbytes for row in own)
    assert planned["stored_tokens"] == int(sum(Store(job.loaded.store).row_counts[row.index] for row in own))
    folder = open_store(job.loaded.store).folder
    # Samples 7 and 8 have one prompt; other tokens of it are kept.
    source, target = (folder(rows[index].root) / shard_key(index) for index in (7, 8))
    shutil.copyfile(source, target)
    assert {(damage.index, damage.kind) for damage in damages(job.loaded)} == {(8, "record")}
    assert command("repair") == ExitCode.DONE
    shutil.rmtree(job.loaded.state_dir)
    for name in ("a", "b"):
        (folder(name) / BACKUP_NAME).unlink(missing_ok=True)
    assert command("repair", "--rebuild-ledger") == ExitCode.DONE
    outcome = run(job)  # its server vouches for the last samples of the one that is gone, by extracting them again
    assert (outcome.committed, outcome.violations) == (10, {})
    assert (wrong_samples(job.loaded), damages(job.loaded)) == ([], [])
    assert command("move", "a") == ExitCode.DONE
    assert {row.root for row in committed_rows(job.loaded).values()} == {"b"}
    capsys.readouterr()
    assert command("show", "s9") == ExitCode.DONE
    assert "17 of 33 tokens, as fp8_e4m3" in capsys.readouterr().out
    assert command("seal") == ExitCode.DONE
    assert command("verify") == ExitCode.DONE
    assert wrong_samples(job.loaded) == []


@pytest.mark.parametrize("on_bad_row", ["refuse", "skip"])
def test_a_row_without_a_token_to_train_on_is_bad(tmp_path: Path, on_bad_row: str) -> None:
    """With the masks' tokens alone nothing of it would be stored."""
    job = write_job(tmp_path, {"storage": {"tokens": "loss"}, "dataset": {"on_bad_row": on_bad_row}})
    rows = [{"id": "a", "input_ids": [1, 2]}, {"id": "b", "input_ids": [1, 2], "loss_mask": [0, 0]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if on_bad_row == "skip":
        assert prepare(load(job), quiet).samples.count == 1
        return
    with pytest.raises(RunError, match="no_loss: loss_mask is zero everywhere") as error:
        prepare(load(job), quiet)
    assert error.value.kind == "dataset_rejected"


@pytest.mark.parametrize(
    ("key", "changed"),
    [("tokens", {"tokens": "all", "context": 0}), ("context", {"context": 3}), ("dtype", {"dtype": "bf16"})],
)
def test_a_job_keeps_what_it_keeps(tmp_path: Path, key: str, changed: dict[str, Any]) -> None:
    first = {"tokens": "loss", "context": 2, "dtype": "fp8_e4m3"}
    prepare(load(write_job(tmp_path, {"storage": first})), quiet)
    with pytest.raises(RunError, match=rf"storage\.{key}") as error:
        prepare(load(write_job(tmp_path, {"storage": first | changed})), quiet)
    assert error.value.kind == "job_changed"


def test_settings_that_contradict_each_other_are_found(tmp_path: Path) -> None:
    loaded = load(write_job(tmp_path, {"storage": {"context": 3, "dtype": "fp8_e4m3"}}))
    found = {finding.key: str(finding) for finding in check(loaded, ModelShape(63, 8, 500, 1024), None)}
    assert "is 3, and storage.tokens is 'all'" in found["storage.context"]
    assert "the odd width 63" in found["storage.dtype"]
