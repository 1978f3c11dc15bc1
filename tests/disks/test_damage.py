"""What was stored is damaged behind everybody's back: verify tells each kind, repair takes back just that, a run mends it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

import hsx
from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.stores.reader import Store
from hsx.testing.commands import hsx_done
from hsx.testing.forgetful_disk import PAGE, ForgetfulDisks, forgetful_disks
from hsx.testing.mounts import ext4, make_ext4
from hsx.testing.promise import assert_kept, committed_rows, damages
from hsx.testing.stores import build_store, random_states
from hsx.testing.tiny_job import TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hsx.testing.servers import RunningServer

pytestmark = pytest.mark.slow

SAMPLES: Final = 16
MEGABYTES: Final = 24
NAMES: Final = ("root-a", "root-b")


@contextmanager
def mounted(disks: ForgetfulDisks, folder: Path) -> Iterator[None]:
    """The roots' disks; the kernel's cache of them goes with the mount."""
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(ext4(disks.folder / name, folder / name))
        yield


def shard(job: TinyJob, index: int) -> Path:
    """The file of a committed sample."""
    return Store(job.loaded.store).info.folder(committed_rows(job.loaded)[index].root) / shard_key(index)


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        (byte,) = file.read(1)
        file.seek(1000)
        file.write(bytes([byte ^ 16]))


def zero_the_tail(path: Path) -> None:
    """As a file system does that gave out blocks and never got their data."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - PAGE)
        file.write(bytes(PAGE))


def punch_a_hole(path: Path) -> None:
    subprocess.run(["fallocate", "--punch-hole", "--offset", "0", "--length", str(PAGE), path], check=True)


def test_each_damage_is_told_taken_back_and_mended(tmp_path: Path, shared_server: RunningServer) -> None:
    job = make_job(tmp_path, samples=SAMPLES, longest=300, server=shared_server)
    (tmp_path / "images").mkdir()
    bases = [make_ext4(tmp_path / "images" / name, MEGABYTES) for name in NAMES]
    with forgetful_disks(tmp_path / "disks", tmp_path / "log", bases) as disks:
        with mounted(disks, tmp_path):
            assert hsx_done(job.loaded.path, "run").process.returncode == ExitCode.DONE
            rows = committed_rows(job.loaded)
            flipped, zeroed, holed, deleted, exchanged, unreadable, cut, given = sorted(rows, key=lambda i: -rows[i].tokens)[:8]
            flip_a_bit(shard(job, flipped))
            zero_the_tail(shard(job, zeroed))
            punch_a_hole(shard(job, holed))
            shard(job, deleted).unlink()
            shutil.copyfile(shard(job, given), shard(job, exchanged))
            os.truncate(shard(job, cut), PAGE)
            lost = shard(job, unreadable).read_bytes()[:PAGE], shard(job, unreadable).parents[1].name
        disks.spoil(lost[1], lost[0])
        with mounted(disks, tmp_path):
            found = {damage.index: damage.kind for damage in damages(job.loaded)}
            assert found == {
                flipped: "chunk",
                zeroed: "zeroed",
                holed: "hole",
                deleted: "missing",
                exchanged: "record",
                unreadable: "unreadable",
                cut: "truncated",
            }
            assert hsx_done(job.loaded.path, "verify").process.returncode == ExitCode.DAMAGED
            repaired = hsx_done(job.loaded.path, "repair", "--json")
            assert repaired.process.returncode == ExitCode.DONE, repaired.error()
            assert json.loads(repaired.out.read_text())["requeued"] == len(found)
            kept = {index: row.marker for index, row in rows.items() if index not in found}
            assert {index: row.marker for index, row in committed_rows(job.loaded).items()} == kept
            done = hsx_done(job.loaded.path, "run")
            assert done.process.returncode == ExitCode.DONE, done.error()
            assert_kept(job.loaded, SAMPLES, kept)


def test_a_reader_survives_a_bad_sector(tmp_path: Path) -> None:
    """A large shard is read through a mapping, where a disk's error could be SIGBUS: it is an error that names the shard."""
    base = make_ext4(tmp_path / "image", MEGABYTES)
    states = random_states(np.random.default_rng(0), 4096, 3, 128)
    (tmp_path / "job" / "a").mkdir(parents=True)
    with forgetful_disks(tmp_path / "disks", tmp_path / "log", [base]) as disks:
        with ext4(disks.folder / base.name, tmp_path / "job" / "a"):
            built = build_store(tmp_path / "job", [states, states[:10]], roots=["a"])
            middle = built.shard(0).read_bytes()[2 << 20 :][:PAGE]
        disks.spoil(base.name, middle)
        with ext4(disks.folder / base.name, tmp_path / "job" / "a"):
            store = hsx.open(tmp_path / "job" / "store")
            assert np.array_equal(store.hidden_states_numpy(1), states[:10])
            with pytest.raises(RunError, match=r"c\.0\.0\.0\.0") as caught:
                store[0]
            assert caught.value.kind == "store_invalid"
