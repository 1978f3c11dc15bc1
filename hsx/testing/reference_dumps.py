"""How the reference engine publishes its dumps, rightly or, on command, wrongly.

Every dump is made by the capture side's own `DumpWriter`, in a work folder beside the dumps, and moved to its place by
rename. Faults strike in between: in the rows before they are written, or in the file before it is moved.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hsx.capture.dumpwriter import DumpWriter
from hsx.core.dump import ERROR_SUFFIX, SUFFIX, decode_header, encode_header

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.dump import DumpHeader
    from hsx.core.epoch import CaptureReport
    from hsx.core.marker import Marker
    from hsx.testing.faults import Armed, Faults

ANOTHER_EPOCH = "00000000-0000-4000-8000-000000000000"
_BF16_NAN = 0x7FC0


@dataclass(slots=True)
class Rows:
    """What one prompt left behind: int32 [tokens], and the bits of bf16 [tokens, L, H]."""

    ids: NDArray[np.int32]
    states: NDArray[np.uint16]


class Publisher:
    """Publishes the dumps of one epoch into its folder. Called from the scheduler's thread only.

    Args:
        folder: `<dump_dir>/<epoch>`.
        report: the capture report that has been published there.
        model: model path as given.
        engine: engine name and version.
        faults: the armed faults.
        recompute: the rows of any other prompt, for faults that need some: ids -> bits of bf16 [tokens, L, H].
    """

    def __init__(
        self,
        folder: Path,
        report: CaptureReport,
        model: str,
        engine: str,
        faults: Faults,
        recompute: Callable[[NDArray[np.int32]], NDArray[np.uint16]],
    ) -> None:
        self._folder = folder
        self._work = folder / ".work"
        self._work.mkdir(exist_ok=True)
        self._writer = DumpWriter(self._work, report.epoch, report.spec, report.hidden_size, model, engine)
        self._vocab = report.vocab_size
        self._faults = faults
        self._recompute = recompute

    def publish(self, marker: Marker, rows: Rows) -> None:
        """Publishes the dump of `marker`, or does what the armed faults say.

        A dump that cannot be written leaves its error file; raises OSError where not even that can be written.
        """
        rid = str(marker)
        self._spoil(rid, rows)
        if self._faults.take("dump_never", rid):
            return
        if self._faults.take("enospc", rid):
            self._failed(marker, OSError(errno.ENOSPC, "No space left on device"))
            return
        try:
            if self._faults.take("sequence_gap", rid):
                self._write(marker, rows).unlink()
            file = self._write(marker, rows)
            self._deface(file, rid)
            late = self._faults.take("dump_late", rid)
            target = self._folder / file.name
            if late:
                timer = threading.Timer(late.number(1.0), file.rename, (target,))
                timer.daemon = True
                timer.start()
                return
            file.rename(target)
            if self._faults.take("dump_twice", rid):
                self._write(marker, rows).rename(target)
        except OSError as error:
            self._failed(marker, error)

    def _write(self, marker: Marker, rows: Rows) -> Path:
        self._writer.begin(marker)
        self._writer.write(marker, 0, rows.states, rows.ids)
        self._writer.publish(marker)
        return self._work / f"{marker}{SUFFIX}"

    def _failed(self, marker: Marker, error: OSError) -> None:
        self._writer.fail(marker, error.strerror or str(error), error.errno or 0)
        name = f"{marker}{ERROR_SUFFIX}"
        (self._work / name).rename(self._folder / name)

    def _spoil(self, rid: str, rows: Rows) -> None:
        for kind, spoil in _SPOILERS.items():
            fault = self._faults.take(kind, rid)
            if fault:
                spoil(rows, fault)
        for kind in ("dump_of_another_sample", "states_of_another_sample"):
            if self._faults.take(kind, rid):
                ids = ((rows.ids + 1) % self._vocab).astype(np.int32)
                rows.states[:] = self._recompute(ids)
                if kind == "dump_of_another_sample":
                    rows.ids[:] = ids

    def _deface(self, file: Path, rid: str) -> None:
        cut = self._faults.take("truncated_file", rid)
        if cut:
            with file.open("r+b") as opened:
                opened.truncate(max(0, file.stat().st_size - int(cut.number(1))))
        if self._faults.take("bad_header", rid):
            with file.open("r+b") as opened:
                opened.seek(8)
                opened.write(b"?")
        for kind, change in _HEADERS.items():
            if self._faults.take(kind, rid):
                with file.open("r+b") as opened:
                    header, start = decode_header(opened.read(1 << 16), file.stat().st_size)
                    # The changed header is as long: fields keep their length, and both are padded to a page.
                    altered = encode_header(change(header))
                    assert len(altered) == start
                    opened.seek(0)
                    opened.write(altered)


_HEADERS: dict[str, Callable[[DumpHeader], DumpHeader]] = {
    "wrong_epoch": lambda header: replace(header, epoch=ANOTHER_EPOCH),
    "wrong_marker_inside": lambda header: replace(header, marker=replace(header.marker, index=header.marker.index + 1)),
    "sequence_reset": lambda header: replace(header, sequence=1),
}


def _state(rows: Rows, fault: Armed) -> NDArray[np.uint16]:
    return rows.states[:, int(fault.number(0))]


def _shift(rows: Rows, fault: Armed) -> None:
    rows.states[:] = np.roll(rows.states, 1, axis=0)
    if fault.kind == "shifted_rows":
        rows.ids[:] = np.roll(rows.ids, 1)


def _lose_last(rows: Rows, _fault: Armed) -> None:
    lost = max(1, len(rows.ids) // 4)
    rows.ids[-lost:] = 0
    rows.states[-lost:] = 0


def _double(rows: Rows, _fault: Armed) -> None:
    half = len(rows.ids) // 2
    rows.ids[half : 2 * half] = rows.ids[:half]
    rows.states[half : 2 * half] = rows.states[:half]


def _alter_id(rows: Rows, _fault: Armed) -> None:
    at = len(rows.ids) // 2
    rows.ids[at] = 1 if rows.ids[at] == 0 else rows.ids[at] - 1


def _zero(rows: Rows, fault: Armed) -> None:
    _state(rows, fault)[:] = 0


def _nan(rows: Rows, fault: Armed) -> None:
    _state(rows, fault)[len(rows.ids) // 2] = _BF16_NAN


def _freeze(rows: Rows, fault: Armed) -> None:
    state = _state(rows, fault)
    state[:] = state[0]


def _equalise(rows: Rows, _fault: Armed) -> None:
    rows.states[:, 0] = rows.states[:, -1]


def _scale(rows: Rows, _fault: Armed) -> None:
    values = (rows.states[:, 0].astype(np.uint32) << 16).view(np.float32) * np.float32(1.5)
    rows.states[:, 0] = (values.view(np.uint32) >> 16).astype(np.uint16)


_SPOILERS: dict[str, Callable[[Rows, Armed], None]] = {
    "shifted_rows": _shift,
    "shifted_states": _shift,
    "last_chunk_missing": _lose_last,
    "chunk_doubled": _double,
    "wrong_ids": _alter_id,
    "zero_layer": _zero,
    "nan_row": _nan,
    "constant_rows": _freeze,
    "equal_layers": _equalise,
    "wrong_layer": _scale,
}
