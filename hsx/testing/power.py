"""Power cuts: something is done once, on disks that remember every write, and then the power fails wherever one likes.

    with recorded(folder, {"home": job, "a": job / "root-a"}) as recording:
        ...                 # make what is there before
        recording.begin()
        ...                 # what is to be cut short
        recording.end()
    for moment in recording.moments(20):
        with recording.cut(moment, random.Random(1)):
            ...             # the same disks, as they are after the power is back

What a disk has after a cut: see `hsx.testing.forgetful_disk`. Nothing is written back for its age here, so that a disk has what
somebody asked to be safe, and no more. Inside `hsx.testing.mounts.private_mounts`.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Final

from hsx.testing.forgetful_disk import ForgetfulDisks, Record, forgetful_disks, images_at, read_log, write_image
from hsx.testing.mounts import ext4, make_ext4

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping

MEGABYTES: Final = 20
"""Size of each disk."""
UNHURRIED: Final = "commit=10000"
"""Seconds after which ext4 would make things safe by itself."""


@dataclass(slots=True)
class Recording:
    """What reached the disks.

    Attributes:
        folder: for images.
        places: where each disk is mounted, by name; folders inside others come after them.
        bases: the disks before.
        disks: while they are there.
        began: moment of `begin`; all that was before is safe.
        records: what reached the disks until `end`.
    """

    folder: Path
    places: Mapping[str, Path]
    bases: list[Path]
    disks: ForgetfulDisks
    began: int = 0
    records: list[Record] = field(default_factory=list)

    def begin(self) -> None:
        """Makes all that is there safe."""
        subprocess.run([which("sync") or "sync", "--file-system", *map(str, self.places.values())], check=True)
        self.began = self.now()

    def now(self) -> int:
        """This moment: what was done before has reached the disks, as far as it does."""
        return self.disks.now()

    def end(self) -> None:
        """The last moment at which the power may fail."""
        self.records = read_log(self.disks.log)

    def moments(self, count: int) -> list[int]:
        """So many moments, evenly spread over what reached the disks, from `begin` to `end`."""
        ends = [self.began, *(record.end for record in self.records if record.end > self.began)]
        return sorted({ends[round(number * (len(ends) - 1) / max(count - 1, 1))] for number in range(count)})

    @contextmanager
    def cut(self, moment: int, rng: random.Random | None = None) -> Iterator[None]:
        """The power fails at that moment, and comes back; see `images_at` for `rng`. The disks can be used, and are forgotten.

        Not while those of the recording itself are mounted.
        """
        with ExitStack() as mounted:
            images = images_at(self.bases, self.records, moment, rng)
            for (name, place), image in zip(self.places.items(), images, strict=True):
                # A file of its own each time: something may still hold what was mounted before.
                with tempfile.NamedTemporaryFile(dir=self.folder, prefix=name) as copy:
                    write_image(Path(copy.name), image)
                    mounted.enter_context(ext4(Path(copy.name), place, UNHURRIED))
            yield


@contextmanager
def recorded(folder: Path, places: Mapping[str, Path]) -> Iterator[Recording]:
    """Mounts an empty disk over each place, and records what reaches them from `begin` to `end`.

    Args:
        folder: for images and the log; made if need be.
        places: where, by the disk's name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bases = [make_ext4(folder / f"base-{name}", MEGABYTES) for name in places]
    with forgetful_disks(folder / "disks", folder / "log", bases) as disks, ExitStack() as mounted:
        for base, place in zip(bases, places.values(), strict=True):
            mounted.enter_context(ext4(disks.folder / base.name, place, UNHURRIED))
        yield Recording(folder, places, bases, disks)
