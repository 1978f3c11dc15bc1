"""What a verification has proved so far, so that one that was cut short goes on; and when the last whole one was.

Each proved sample is one record of 12 bytes, appended to a file: its index and a digest of what the ledger said of it. A sample
that was moved or extracted again since has another digest, and is read again; so is a damaged one, which is never noted. A
record that was cut short by a crash is one that is not there.
"""

from __future__ import annotations

import json
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from hsx.errors import RunError
from hsx.stores.durable import write_json

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.stores.group import StoreInfo
    from hsx.verify.shard import Expected

FORMAT: Final = "hsx-verify-1"
FILE_NAME: Final = "verify.json"
RECORD: Final = np.dtype([("index", "<u8"), ("digest", "<u4")])
FLUSH_RECORDS: Final = 256
FLUSH_S: Final = 5.0
MARGIN_S: Final = 60.0
"""A commit bears the time at which its transaction began, and clocks step back: so much earlier than the verification began is
what it vouches for.
"""


def state_beside(store: Path) -> Path:
    """Where the state of a verification without a job file is kept: beside the store, where no Zarr reader sees it."""
    store = store.resolve()
    return store.with_name(f".{store.name}.{FILE_NAME}")


def digest(expected: Expected) -> int:
    """What the proof of a sample rests on."""
    text = f"{expected.root}\0{expected.path}\0{expected.nbytes}\0{expected.crc32c}\0{expected.marker}"
    return zlib.crc32(text.encode(errors="surrogateescape"))


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of verifications before.

    Attributes:
        store: the store's uuid.
        sound_until: everything committed up to this, in Unix seconds, was once proved; None where nothing is known.
        began: when the one that was cut short began; None where none was.
    """

    store: str
    sound_until: float | None
    began: float | None


def read_past(path: Path, store_id: str) -> Past:
    """What the state file says; nothing for a file that is not there, not readable or of another store."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        document: dict[str, Any] = json.loads(path.read_bytes())
        if (document["format"], document["store_id"]) == (FORMAT, store_id):
            sound, began = document["sound_until"], document["began"]
            return Past(store_id, None if sound is None else float(sound), None if began is None else float(began))
    return Past(store_id, None, None)


class VerifyState:
    """The state of one verification, kept in two files: `path` (JSON) and `path` with `.proved` behind it. A context manager.

    Args:
        path: the JSON file; its folder exists.
        info: the store.
        resume: go on with the one that was cut short, if there is one.

    Raises:
        RunError: `store_unwritable` where the files cannot be written.
    """

    def __init__(self, path: Path, info: StoreInfo, *, resume: bool) -> None:
        self._path = path
        self._proved_path = path.with_name(path.name + ".proved")
        self._past = read_past(path, info.store_id)
        self._store_id = info.store_id
        self._proved = np.zeros(0, np.bool_)
        self._digests = np.zeros(0, np.uint32)
        self._pending = bytearray()
        self.began = time.time()
        try:
            mode = "wb"
            if resume and self._past.began is not None:
                self.began = self._past.began
                self._load(info.layout.samples)
                mode = "ab"
            self._file = self._proved_path.open(mode, buffering=0)
            self._flushed = time.monotonic()
            self._write(self._past.sound_until, self.began)
        except OSError as error:
            raise RunError("store_unwritable", f"{path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._file.close()

    def proved(self, expected: Expected) -> bool:
        """Whether this very commit of the sample was proved before."""
        if not 0 <= expected.index < len(self._proved):
            return False
        return bool(self._proved[expected.index]) and int(self._digests[expected.index]) == digest(expected)

    def note(self, expected: Expected) -> None:
        """The sample is proved."""
        self._pending += np.array([(expected.index, digest(expected))], RECORD).tobytes()
        now = time.monotonic()
        if len(self._pending) >= FLUSH_RECORDS * RECORD.itemsize or now - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Writes what was noted; what cannot be written is merely read again by the next one."""
        with suppress(OSError):
            self._file.write(self._pending)
        self._pending.clear()
        self._flushed = time.monotonic()

    def finish(self, *, sound: bool, since: float | None) -> None:
        """The verification came to its end.

        Args:
            sound: every sample that it was about was read, and nothing is damaged.
            since: what was committed before this was left out; None: nothing was.
        """
        before = self._past.sound_until
        continuous = since is None or (before is not None and since <= before)
        with suppress(OSError):
            self._write(self.began - MARGIN_S if sound and continuous else before, None)
            self._proved_path.unlink(missing_ok=True)

    def _load(self, samples: int) -> None:
        self._proved = np.zeros(samples, np.bool_)
        self._digests = np.zeros(samples, np.uint32)
        raw = b""
        with suppress(FileNotFoundError):
            raw = self._proved_path.read_bytes()
        whole = len(raw) // RECORD.itemsize * RECORD.itemsize
        if whole != len(raw):
            with self._proved_path.open("r+b") as file:
                file.truncate(whole)
        records = np.frombuffer(raw[:whole], RECORD)
        records = records[records["index"] < samples]
        self._proved[records["index"]] = True
        self._digests[records["index"]] = records["digest"]

    def _write(self, sound_until: float | None, began: float | None) -> None:
        write_json(self._path, {"format": FORMAT, "store_id": self._store_id, "sound_until": sound_until, "began": began})
