"""Roots that are added to a job file, emptied, taken out of it and put back, with real runs in between."""

from __future__ import annotations

import tomllib
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from hsx.commands.toml_text import to_toml
from hsx.config_load import load
from hsx.exit_codes import ExitCode
from hsx.stores.draining import is_draining
from hsx.stores.group import open_store
from hsx.testing.commands import hsx_done
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.testing.commands import HsxProcess
    from hsx.testing.servers import RunningServer

pytestmark = pytest.mark.slow

SAMPLES = 12


def with_roots(job: TinyJob, *names: str) -> TinyJob:
    """The job with other roots in its file."""
    file = job.loaded.path
    document = tomllib.loads(file.read_text())
    document["roots"] = [{"name": name, "path": f"root-{name}", "reserve": "0B"} for name in names]
    file.write_text(to_toml(document))
    for name in names:
        (job.folder / f"root-{name}").mkdir(exist_ok=True)
    return TinyJob(load(file), job.folder)


def homes(job: TinyJob) -> Counter[str]:
    """Committed samples by root."""
    with job.ledger() as ledger:
        return Counter(row.root for row in ledger.committed())


def done(job: TinyJob, *arguments: str) -> HsxProcess:
    """A command that ends well."""
    command = hsx_done(job.loaded.path, *arguments)
    assert command.process.returncode == ExitCode.DONE, command.error()
    return command


def requeue_all_but(job: TinyJob, count: int) -> None:
    """Has the first samples extracted again: one bit of each of their shards is turned, and `hsx repair` finds that."""
    with job.ledger() as ledger:
        rows = [row for row in ledger.committed() if row.index >= count]
    store = open_store(job.loaded.store)
    for row in rows:
        shard = store.folder(row.root) / f"c.{row.index}.0.0.0"
        data = bytearray(shard.read_bytes())
        data[0] ^= 1
        shard.write_bytes(data)
    done(job, "repair")


async def test_a_root_is_taken_out_and_comes_back(tmp_path: Path, server: RunningServer) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server)
    await job.run()
    on_a = homes(job)["a"]
    assert 0 < on_a < SAMPLES

    early = hsx_done(with_roots(job, "b").loaded.path, "run")
    assert early.process.returncode == ExitCode.REFUSED
    assert early.error().startswith("[config_conflict]")
    assert f"does not name root a, and {on_a} committed samples lie there" in early.error()
    assert list(open_store(job.loaded.store).roots) == ["a", "b"]

    done(with_roots(job, "a", "b"), "move", "a")
    job = with_roots(job, "b")
    done(job, "run")
    assert list(open_store(job.loaded.store).roots) == ["b"]
    assert homes(job) == {"b": SAMPLES}
    done(job, "verify")

    job = with_roots(job, "b", "c", "a")
    done(job, "run")
    assert list(open_store(job.loaded.store).roots) == ["b", "c", "a"]
    assert not is_draining(open_store(job.loaded.store).folder("a"))
    requeue_all_but(job, 4)
    done(job, "run")
    assert sorted(homes(job)) == ["a", "b", "c"]
    assert homes(job).total() == SAMPLES
    assert wrong_samples(job.loaded) == []
    done(job, "verify")


async def test_a_root_that_is_being_emptied_takes_nothing_new(tmp_path: Path, server: RunningServer) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server)
    await job.run()
    done(job, "move", "a")
    requeue_all_but(job, 0)
    assert homes(job) == {}
    done(job, "run")
    assert homes(job) == {"b": SAMPLES}
    done(job, "move", "a", "--cancel")
    requeue_all_but(job, 0)
    done(job, "run")
    assert sorted(homes(job)) == ["a", "b"]
    assert wrong_samples(job.loaded) == []
