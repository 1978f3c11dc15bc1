"""What a verification says: damage by its kind, a report, and how far the reading is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from hsx.stores.shard_reader import PROBLEMS

LISTED: Final = 1000
"""So many damages and uncommitted samples are listed; all are counted."""
KINDS: Final[dict[str, str]] = {
    **{str(problem): meaning for problem, meaning in PROBLEMS.items()},
    "hole": "the file system has no data for a part of the file: it was never written there, or was given back",
    "zeroed": "there are zeros in place of data: what a disk returns for what it lost",
    "record": "the shard says that it is another sample's, attempt's or store's, or has no sound record of its own",
    "ids": "the shard was made of other token ids than the token arrays have, or those cannot be read",
    "root": "a root of the store cannot be listed, or the ledger names one that the store does not know",
    "ledger": "the ledger has another number of tokens for the sample than the store",
    "size": "the shard file has another size than the ledger says",
    "crc32c": "the payload has another crc32c than the ledger, or the shard's record, says: whole, but not what was committed",
    "link": "the union view does not show the committed shard; the next `hsx run` repairs it",
    "uncommitted_visible": "the union view shows a sample that the ledger does not hold as committed",
    "manifest": "a metadata or token file of a sealed store is not what the manifest says",
    "finite": "there are NaN or infinite values",
    "nonzero_rows": "there are all-zero rows",
    "not_repeated": "states are copies of each other, or all rows are equal",
}
OF_SHARDS: Final = frozenset(KINDS) - {"root", "ledger", "link", "uncommitted_visible", "manifest", "ids"}
"""Damage of the stored states themselves, which extracting the sample again mends."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        index: the sample; None where it concerns a whole root, or the store.
        sample_id: its id; "" where it concerns a whole root, or the store.
        kind: one of `KINDS`.
        message: what was expected and what was found.
    """

    index: int | None
    sample_id: str
    kind: str
    message: str


@dataclass(slots=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        store: path of the store.
        samples: samples of the job.
        committed: those that the ledger (without one: the seal, or else the union view) holds as committed, and that this
            verification is about.
        read: those whose shards were read now.
        resumed: those that were proved before, by the verification that this one goes on with, and not read again.
        tokens: tokens read.
        nbytes: bytes of the shard files that were read.
        uncommitted: shards without a committed row: left by attempts under way or cut short; no damage.
        uncommitted_indices: the first `LISTED` of them.
        damaged: number of damages.
        damage: the first `LISTED` of them, in the order found.
        sealed: the store is sealed, and its metadata and tokens were held against its manifest.
        seconds: how long it took.
    """

    store: str
    samples: int
    committed: int = 0
    read: int = 0
    resumed: int = 0
    tokens: int = 0
    nbytes: int = 0
    uncommitted: int = 0
    uncommitted_indices: list[int] = field(default_factory=list)
    damaged: int = 0
    damage: list[Damage] = field(default_factory=list)
    sealed: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing is damaged."""
        return self.damaged == 0

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Reading:
    """How far the reading is.

    Attributes:
        samples: shards read so far.
        samples_total: shards to read.
        nbytes: bytes read so far.
        nbytes_total: bytes to read, about.
        damaged: damages so far.
        seconds: since the first read.
    """

    samples: int
    samples_total: int
    nbytes: int
    nbytes_total: int
    damaged: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The rate so far; 0 where there is none yet."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds that are left at this rate; None where it is not known yet."""
        rate = self.bytes_per_second
        return max(self.nbytes_total - self.nbytes, 0) / rate if rate else None
