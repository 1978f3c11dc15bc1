"""How the reference engine publishes its dumps, rightly or, on command, wrongly.

Every dump is made by the capture side's own `DumpWriter`, under a name that nobody looks at, and moved to its place by
rename. Faults strike in between: in the rows before they are written, or in the file before it is moved. What is numbered,
published or given up is counted by the capture side's own `Counter`.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hsx.capture.dumpwriter import DumpWriter
from hsx.core.dump import PART_SUFFIX, SUFFIX, decode_header, encode_header

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.capture.counter import Counter
    from hsx.core.dump import DumpHeader
    from hsx.core.epoch import CaptureReport
    from hsx.core.marker import Marker
    from hsx.testing.faults import Armed, Faults

ANOTHER_EPOCH = "00000000-0000-4000-8000-000000000000"
NEVER_SENT = 1000
"""What the fault of that name adds to the attempt."""
_BF16_NAN = 0x7FC0


@dataclass(slots=True)
class Rows:
    """What one prompt left behind: int32 [tokens], and the bits of bf16 [tokens, L, H]."""

    ids: NDArray[np.int32]
    states: NDArray[np.uint16]


class _Staged(DumpWriter):
    """Leaves a whole dump as `<marker>.safetensors.part`, for whoever is to spoil it and move it to its name."""

    def _path(self, marker: Marker, suffix: str) -> str:
        return super()._path(marker, suffix + PART_SUFFIX if suffix == SUFFIX else suffix)


class Publisher:
    """Publishes the dumps of one epoch into its folder. Called from the scheduler's thread only.

    Attributes:
        counter: what has been done so far; the scheduler saves it after each step.

    Args:
        folder: `<dump_dir>/<epoch>`.
        report: the capture report that has been published there.
        model: model path as given.
        engine: engine name and version.
        counter: the epoch's.
        faults: the armed faults.
        recompute: the rows of any other prompt, for faults that need some: ids -> bits of bf16 [tokens, L, H].
    """

    def __init__(
        self,
        folder: Path,
        report: CaptureReport,
        model: str,
        engine: str,
        counter: Counter,
        faults: Faults,
        recompute: Callable[[NDArray[np.int32]], NDArray[np.uint16]],
    ) -> None:
        self.counter = counter
        self._folder = folder
        self._writer = _Staged(folder, report.epoch, report.spec, report.hidden_size, model, engine, report.rank)
        self._repeats = 0
        self._vocab = report.vocab_size
        self._faults = faults
        self._recompute = recompute

    def publish(self, marker: Marker, rows: Rows) -> None:
        """Publishes the dump of `marker`, or does what the armed faults say.

        A dump that cannot be written leaves its error file. Where not even that can be written, as when the folder is gone,
        it is given up, as in the plugin.
        """
        rid = str(marker)
        self._spoil(rid, rows)
        if self._faults.take("dump_never", rid):
            return
        if self._faults.take("enospc", rid):
            self._failed(marker, OSError(errno.ENOSPC, "No space left on device"))
            return
        late = self._faults.take("dump_late", rid)
        if late:
            self._later(late.number(1.0), marker, lambda: self._publish(marker, rows))
        elif self._faults.armed("dump_withheld", rid):
            self._later(0.0, marker, lambda: self._withhold(marker, rows))
        else:
            self._contained(marker, lambda: self._publish(marker, rows))

    def _withhold(self, marker: Marker, rows: Rows) -> None:
        self._faults.hold(str(marker), lambda: False, "dump_withheld")
        self._publish(marker, rows)

    def _contained(self, marker: Marker, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            self._failed(marker, error)

    def _publish(self, marker: Marker, rows: Rows) -> None:
        rid = str(marker)
        if self._faults.take("sequence_gap", rid):
            file, sequence = self._write(marker, rows)
            file.unlink()
            self.counter.add(sequence=sequence)
        if self._writer.sequence > self._repeats and self._faults.take("sequence_repeat", rid):
            self._repeats += 1
        file, sequence = self._write(marker, rows)
        self._deface(file, rid)
        if self._faults.take("dump_vanishes", rid):
            file.unlink()
            self.counter.add(sequence=sequence, published=1)
            return
        self._place(marker, file, sequence)
        twice = self._faults.take("dump_twice", rid)
        if twice and twice.number(0) > 0:
            self._later(twice.number(0), marker, lambda: self._place(marker, *self._write(marker, rows)))
        elif twice:
            self._place(marker, *self._write(marker, rows))
        if self._faults.take("never_sent", rid):
            other = replace(marker, attempt=marker.attempt + NEVER_SENT)
            self._place(other, *self._write(other, rows))

    def _write(self, marker: Marker, rows: Rows) -> tuple[Path, int]:
        """The whole dump under its work name, and the number in it."""
        self._writer.begin(marker)
        self._writer.write(marker, 0, rows.states, rows.ids)
        sequence = self._writer.publish(marker) - self._repeats
        file = self._folder / f"{marker}{SUFFIX}{PART_SUFFIX}"
        if self._repeats:
            _alter(file, lambda header: replace(header, sequence=sequence))
        return file, sequence

    def _place(self, marker: Marker, file: Path, sequence: int) -> None:
        file.rename(self._folder / f"{marker}{SUFFIX}")
        self.counter.add(sequence=sequence, published=1)

    def _later(self, seconds: float, marker: Marker, step: Callable[[], None]) -> None:
        """Publishes from a thread of its own, `seconds` from now, with the number that is next by then."""

        def run() -> None:
            self._contained(marker, step)
            self.counter.save()

        timer = threading.Timer(seconds, run)
        timer.daemon = True
        timer.start()

    def _failed(self, marker: Marker, error: OSError) -> None:
        try:
            self._writer.fail(marker, error.strerror or str(error), error.errno or 0)
        except OSError:
            self.counter.add(incomplete=1)
        else:
            self.counter.add(failed=1)

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
                _alter(file, change)


def _alter(file: Path, change: Callable[[DumpHeader], DumpHeader]) -> None:
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
