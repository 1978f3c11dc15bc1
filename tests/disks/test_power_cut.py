"""The power fails in the run: store, ledger and roots are on disks that forget what was not flushed.

One run is recorded, and cut wherever one likes afterwards: see `hsx.testing.forgetful_disk`. The dump directory is a tmpfs, and
gone with the power, as the server is.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.forgetful_disk import Record, forgetful_disks, images_at, read_log, write_image
from hsx.testing.mounts import boot, ext4, make_ext4
from hsx.testing.promise import assert_kept, committed_rows, damages
from hsx.testing.servers import running_reference
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx.ports import CommittedRow

pytestmark = pytest.mark.slow

SAMPLES: Final = 24
MEGABYTES: Final = 20
NAMES: Final = ("home", "root-a", "root-b")
"""The disks: of the store and the ledger, and one for each root."""
NEVER: Final = "commit=10000"
"""Nothing is written back for its age: a disk has what somebody asked to be safe, and no more."""
LOOKS: Final = 24
RESUMES: Final = (0.05, 0.3, 0.6, 0.85, 1.0)


@dataclass(frozen=True)
class Recorded:
    """A run that came to its end, and all that reached the disks in it.

    Attributes:
        folder: of everything.
        job: on the first disk.
        bases: the disks before.
        records: what reached them.
        began: the moment at which the run began; what was there before is safe.
        told: (moment, index, marker): by then, the log had said that the sample is committed.
        rows: the ledger's at the end.
    """

    folder: Path
    job: TinyJob
    bases: list[Path]
    records: list[Record]
    began: int
    told: list[tuple[int, int, str]]
    rows: dict[int, CommittedRow]

    def moments(self, count: int) -> list[int]:
        """So many moments of the run, evenly spread over what reached the disks, from the first to the last."""
        ends = [record.end for record in self.records if record.end >= self.began]
        return [ends[round(number * (len(ends) - 1) / (count - 1))] for number in range(count)]

    def told_at(self, moment: int) -> dict[int, str]:
        """Markers of the samples that were said to be committed by then, by index."""
        return {index: marker for when, index, marker in self.told if when <= moment}

    @contextmanager
    def cut(self, moment: int, rng: random.Random | None) -> Iterator[None]:
        """The power fails at that moment; the disks are mounted again, with what they hold."""
        with ExitStack() as mounted:
            for name, image in zip(NAMES, images_at(self.bases, self.records, moment, rng), strict=True):
                # A new file each time: a process of the last cut may still hold what was mounted then.
                with tempfile.NamedTemporaryFile(dir=self.folder) as copy:
                    write_image(Path(copy.name), image)
                    mounted.enter_context(ext4(Path(copy.name), place(self.job.folder, name), NEVER))
            yield


def place(folder: Path, name: str) -> Path:
    """Where a disk is mounted: the home disk over the job's folder, the roots in it."""
    return folder if name == "home" else folder / name


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("power")
    bases = [make_ext4(folder / name, MEGABYTES) for name in NAMES]
    told = []
    with forgetful_disks(folder / "disks", folder / "log", bases) as disks, ExitStack() as mounted:
        for name in NAMES:
            mounted.enter_context(ext4(disks.folder / name, place(folder / "job", name), NEVER))
        job = make_job(
            folder / "job",
            samples=SAMPLES,
            longest=300,
            staging={"dump_dir": str(folder / "dumps")},
            pipeline={"concurrency": 4, "commit_samples": 3},
        )
        subprocess.run(["sync", "--file-system", *(place(job.folder, name) for name in NAMES)], check=True)
        began = disks.now()
        with running_reference(job.loaded.dump_dir, LAYERS, model=job.loaded.model, port=job.loaded.config.engine.port):
            command = [sys.executable, "-m", "hsx", "run", str(job.loaded.path)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
                assert process.stderr is not None
                for line in process.stderr:
                    if line.startswith("{") and json.loads(line)["event"] == "sample.committed":
                        said = json.loads(line)
                        # The moment at which it was read lies behind the one at which it was said: whatever holds then held.
                        told.append((disks.now(), said["index"], said["marker"]))
            assert process.returncode == ExitCode.DONE
        rows = committed_rows(job.loaded)
        records = read_log(disks.log)
    assert len(told) == len(rows) == SAMPLES
    return Recorded(folder, job, bases, records, began, told, rows)


def test_the_power_fails_anywhere(recorded: Recorded) -> None:
    """What was said to be committed is committed, and what is committed is there and right, before anything is repaired."""
    most = 0
    for number, moment in enumerate(recorded.moments(LOOKS)):
        with recorded.cut(moment, random.Random(number) if number % 2 else None):
            rows = committed_rows(recorded.job.loaded)
            told = recorded.told_at(moment)
            assert {index: rows[index].marker for index in told if index in rows} == told, f"lost by a cut at {moment}"
            then = {index: row for index, row in recorded.rows.items() if index in rows}
            assert rows == then, f"wrong after a cut at {moment}"
            # Links are made after the commit and need not be durable: the next run repairs them.
            found = [damage for damage in damages(recorded.job.loaded) if damage.kind != "link"] if rows else []
            assert found == [], f"damaged by a cut at {moment}"
            most = max(most, len(rows))
    assert most == SAMPLES


@pytest.mark.parametrize("share", RESUMES)
async def test_the_next_start_goes_on(recorded: Recorded, share: float) -> None:
    """The machine boots again, with an empty dump directory and a new server; the same command ends the job."""
    job = recorded.job
    moment = recorded.moments(1000)[round(share * 999)]
    shutil.rmtree(job.loaded.dump_dir)
    with recorded.cut(moment, random.Random(int(share * 100))), boot(str(uuid.UUID(int=round(share * 100))), recorded.folder):
        told = recorded.told_at(moment)
        assert told.keys() <= committed_rows(job.loaded).keys()
        async with job.server():
            outcome = await job.run()
        assert (outcome.committed, outcome.pending, outcome.quarantined, outcome.restarts) == (SAMPLES, 0, 0, 0)
        assert_kept(job.loaded, SAMPLES, told)
