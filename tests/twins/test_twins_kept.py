"""A store with shared shards after its run: moved, damaged, repaired, rebuilt, sealed; and disks that take no hard links."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest

from hsx.core.layout import shard_key
from hsx.locks import Homes, at_rest
from hsx.move import Mover, MoveSettings, Step
from hsx.rebuild import rebuild
from hsx.repair import repair
from hsx.seal import seal, unseal
from hsx.stores.draining import begin_draining
from hsx.stores.group import open_store
from hsx.stores.ledger_backup import BACKUP_NAME
from hsx.stores.ledger_move import MoveLedger
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.reader import Store
from hsx.testing.tiny_job import make_job
from hsx.testing.truth import wrong_samples
from hsx.testing.twin_rows import write_rows
from hsx.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.config_load import LoadedConfig
    from hsx.testing.tiny_job import TinyJob

T = TypeVar("T")
GROUPS = ([0, 2, 5], [1, 4], [7, 8])


@pytest.fixture
async def job(twin_job: TinyJob) -> TinyJob:
    """Its run is over."""
    await twin_job.run()
    return twin_job


async def at_rest_do(job: TinyJob, command: Callable[[LoadedConfig], T]) -> T:
    """As the command line does it."""
    with at_rest(job.loaded):
        return await asyncio.to_thread(command, job.loaded)


def paths(job: TinyJob) -> dict[int, Path]:
    store = Store(job.loaded.store)
    return {int(index): store.shard_path(int(index)) for index in store.committed}


def inodes(job: TinyJob) -> dict[int, int]:
    return {index: path.stat().st_ino for index, path in paths(job).items()}


def sharing(job: TinyJob) -> bool:
    """Whether each group has one file, and nobody else has it."""
    files = inodes(job)
    return len(set(files.values())) == 6 and all(len({files[index] for index in group}) == 1 for group in GROUPS)


def sound(job: TinyJob) -> bool:
    with job.ledger() as ledger:
        report = verify(job.loaded.store, ledger)
    return report.ok and (report.read, report.uncommitted) == (10, 0) and wrong_samples(job.loaded) == []


def pending(job: TinyJob) -> list[int]:
    with job.ledger() as ledger:
        return [index for index in range(10) if ledger.sample(index).state == "pending"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    with path.open("r+b") as file:  # in place: it is the file of all its names
        file.write(data)


def move(job: TinyJob, source: str, target: str, reached: Callable[[Step], None] = lambda _step: None) -> int:
    info = open_store(job.loaded.store)
    begin_draining(info.folder(source), source)
    with MoveLedger(job.loaded.state_dir / FILE_NAME) as ledger:
        settings = MoveSettings(threads=1, batch_samples=2)
        return Mover(info, source, [target], ledger, Homes(job.loaded.state_dir), settings, reached=reached).run().moved


async def test_a_move_keeps_one_file(job: TinyJob) -> None:
    store = open_store(job.loaded.store)
    with job.ledger() as ledger:
        on_a = [row.index for row in ledger.committed() if row.root == "a"]
        before = ledger.counts()
    assert move(job, "a", "b") == len(on_a)
    with job.ledger() as ledger:
        assert {row.root for row in ledger.committed()} == {"b"}
        assert ledger.counts() == before
    assert not list(store.folder("a").glob("c.*"))
    assert not list(store.folder("b").glob("*.partial"))
    assert sharing(job)
    assert sound(job)


class EndedError(Exception):
    """The test ends the move here."""


@pytest.mark.parametrize("step", ["copied", "linked", "named", "shown", "switched", "committed", "tidied", "discarded"])
async def test_a_move_that_is_cut_short_goes_on(job: TinyJob, step: Step) -> None:
    """At each of its steps, wherever it is met for the second time: all are whole, and in the end there is one file."""
    times = 0

    def reached(now: Step) -> None:
        nonlocal times
        times += now == step
        if times == 2:
            raise EndedError

    source = "a" if sum(path.parent.parent.name == "root-a" for path in paths(job).values()) > 4 else "b"
    target = "b" if source == "a" else "a"
    with pytest.raises(EndedError):
        move(job, source, target, reached)
    assert wrong_samples(job.loaded) == []
    move(job, source, target)
    assert sound(job)
    assert sharing(job)


async def test_damage_takes_all_back_that_share_the_shard_and_one_prefill_mends_it(job: TinyJob) -> None:
    flip(paths(job)[5])
    report = await at_rest_do(job, repair)
    assert (report.requeued, pending(job)) == (3, [0, 2, 5])
    assert report.by_kind == {"chunk": 3}
    with job.ledger() as ledger:
        row = ledger.row(7)
        assert row is not None
        assert ledger.counts().shared == 2
    outcome = await job.run()
    assert (outcome.committed, outcome.shared) == (10, 4)
    assert outcome.tokens == Store(job.loaded.store).tokens(0)
    assert sharing(job)
    assert sound(job)


async def test_a_lost_name_is_mended_as_well(job: TinyJob) -> None:
    paths(job)[4].unlink()
    with job.ledger() as ledger:
        assert [(damage.index, damage.kind) for damage in verify(job.loaded.store, ledger).damage] == [(4, "missing")]
    await at_rest_do(job, repair)
    assert pending(job) == [1, 4]
    await job.run()
    assert sharing(job)
    assert sound(job)


@pytest.mark.parametrize("copies", [True, False])
async def test_a_lost_ledger_is_built_again_with_its_twins(job: TinyJob, copies: bool) -> None:
    with job.ledger() as ledger:
        before, rows = ledger.counts(), list(ledger.committed())
    info = open_store(job.loaded.store)
    for name in info.roots:
        if not copies:
            (info.folder(name) / BACKUP_NAME).unlink(missing_ok=True)
    (job.loaded.state_dir / FILE_NAME).unlink()
    report = await at_rest_do(job, rebuild)
    assert (report.committed, report.pending, report.shared, report.refused) == (10, 0, 4, 0)
    with job.ledger() as ledger:
        assert ledger.counts() == before
        assert list(ledger.committed()) == rows
        assert ledger.twins(0) == [2, 5]
    assert sharing(job)
    assert sound(job)


async def test_a_rebuild_that_misses_a_name_finds_the_others(tmp_path: Path) -> None:
    """The one that is missing stands for itself, then: it is extracted once more."""
    job = make_job(tmp_path)
    write_rows(tmp_path)
    async with job.server():
        await job.run()
    info = open_store(job.loaded.store)
    for name in info.roots:
        (info.folder(name) / BACKUP_NAME).unlink(missing_ok=True)
    paths(job)[0].unlink()
    (job.loaded.state_dir / FILE_NAME).unlink()
    report = await at_rest_do(job, rebuild)
    assert (report.committed, report.pending) == (9, 1)
    async with job.server():  # another one: what was known of the first is lost
        outcome = await job.run()
    assert (outcome.committed, outcome.pending) == (10, 0)
    assert sound(job)


async def test_a_sealed_store_has_its_twins_and_proves_them_without_a_ledger(job: TinyJob) -> None:
    report = await asyncio.to_thread(seal, job.loaded, partial=True, read=True)
    assert (report.sealed, report.committed) == (True, 10)
    assert verify(job.loaded.store).ok
    store = Store(job.loaded.store)
    assert np.array_equal(store[5].hidden_states_numpy, store[0].hidden_states_numpy)
    assert store.info.sealed is not None
    assert store.info.sealed["shared"] == 4
    assert store.captured_as(5) == 0
    assert store.captured_as(3) == 3
    foreign = paths(job)[9].read_bytes()
    target = paths(job)[8]
    target.unlink()
    target.write_bytes(foreign)
    assert {damage.index for damage in verify(job.loaded.store).damage} == {8}
    await asyncio.to_thread(unseal, job.loaded)


async def test_an_unsealed_store_without_its_ledger_proves_twins_by_ids(job: TinyJob) -> None:
    (job.loaded.state_dir / FILE_NAME).unlink()
    report = verify(job.loaded.store)
    assert (report.ok, report.read) == (True, 10)
    info = open_store(job.loaded.store)
    (twin,) = [path for root in info.roots if (path := info.folder(root) / shard_key(8)).exists()]
    data = paths(job)[9].read_bytes()
    twin.unlink()
    twin.write_bytes(data)
    assert {damage.index for damage in verify(job.loaded.store).damage} == {8}
