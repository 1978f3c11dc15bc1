"""Staging against a plain synchronous account of the same forwards: for any schedule the same files, numbers and counts."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx.capture.calls import DumpsHere
from hsx.capture.counter import Counter
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.pool import Pool
from hsx.capture.session import Session
from hsx.capture.staging import Staging
from hsx.capture.writer_process import DumpsElsewhere
from hsx.core.epoch import STATE_NAME, state_from_json
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.dumps.reader import MappedDump

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.capture.calls import Dumps

SPEC = CaptureSpec((1,), "post_norm")
WIDTH = 8
FOREVER_S = 300.0
MARKERS = [Marker("0a0b0c0d", index, 1, tokens) for index, tokens in enumerate((1, 3, 7, 20, 50, 200))]


def refuse(folder: Path, marker: Marker) -> None:
    """Makes it impossible to write the dump of a marker, for whoever tries."""
    (folder / f"{marker}.part").mkdir()


# One chunk of a forward: which marker, how many tokens at most, and whether its request begins again with it.
CHUNK = st.tuples(st.integers(0, len(MARKERS) - 1), st.integers(1, 60), st.booleans())
FORWARDS = st.lists(st.lists(CHUNK, min_size=1, max_size=4, unique_by=lambda chunk: chunk[0]), min_size=1, max_size=16)


REFUSED = st.sets(st.sampled_from(MARKERS), max_size=2)
POOLS = st.sampled_from([256, 1024, 1 << 16])


@settings(max_examples=40)
@given(FORWARDS, REFUSED, POOLS)
def test_any_schedule(forwards: list[list[tuple[int, int, bool]]], refused: set[Marker], pool_bytes: int) -> None:
    try_schedule(forwards, refused, pool_bytes, lambda writer, _pool, _counter: DumpsHere(writer))


@settings(max_examples=15)
@given(FORWARDS, REFUSED, POOLS)
def test_any_schedule_with_a_writer_process(
    forwards: list[list[tuple[int, int, bool]]], refused: set[Marker], pool_bytes: int
) -> None:
    def elsewhere(writer: DumpWriter, pool: Pool, counter: Counter) -> Dumps:
        assert pool.memory is not None
        return DumpsElsewhere(writer, pool.memory, counter.lock_fd)

    try_schedule(forwards, refused, pool_bytes, elsewhere)


def try_schedule(
    forwards: list[list[tuple[int, int, bool]]],
    refused: set[Marker],
    pool_bytes: int,
    make: Callable[[DumpWriter, Pool, Counter], Dumps],
) -> None:
    done = dict.fromkeys(MARKERS, 0)
    tries = dict.fromkeys(MARKERS, 0)
    whole: dict[Marker, int] = {}  # and with which forward
    begun: set[Marker] = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counter = Counter(folder, "epoch")
        writer = DumpWriter(folder, "epoch", SPEC, WIDTH, "model", "test 1")
        for marker in refused:
            refuse(folder, marker)
        pool = Pool(pool_bytes, SPEC.states, WIDTH, torch.bfloat16)
        staging = Staging(make(writer, pool, counter), counter, pool)
        session = Session(staging, len(SPEC.layers), patience_s=FOREVER_S)
        for turn, forward in enumerate(forwards):
            chunks = []
            for index, count, again in forward:
                marker = MARKERS[index]
                if again and marker not in whole:
                    done[marker] = 0
                if done[marker] == 0:
                    tries[marker] += marker not in whole
                count = min(count, marker.tokens - done[marker])
                if count:
                    chunks.append((marker, done[marker], count))
                    done[marker] += count
                    begun.add(marker)
                    if done[marker] == marker.tokens:
                        whole[marker] = turn
            ids = torch.cat([content(m, tries[m])[o : o + n] for m, o, n in chunks] or [torch.zeros(0)])
            batch = session.begin([str(m) for m, _, _ in chunks], [o for _, o, _ in chunks], [n for _, _, n in chunks], ids)
            if batch is not None:
                states = ids.float()[:, None].repeat(1, WIDTH)
                session.tensors(batch, [states], states + 1)
                states += 100
                session.finish(batch)
            session.save()
        assert staging.flush(FOREVER_S)
        state = state_from_json((folder / STATE_NAME).read_text())
        published = [marker for marker in whole if marker not in refused]
        numbers = {}
        for marker in published:
            dump = MappedDump(folder / f"{marker}.safetensors")
            ids = content(marker, tries[marker])
            numbers[dump.header.sequence] = whole[marker]
            assert dump.input_ids.tolist() == ids.tolist()
            found = torch.from_numpy(dump.states.copy()).view(torch.bfloat16).float()
            wanted = ids.float()[:, None].repeat(1, WIDTH)
            assert torch.equal(found, torch.stack([wanted, wanted + 1], 1))
            dump.close()
        assert sorted(numbers) == list(range(1, len(published) + 1))
        assert [numbers[number] for number in sorted(numbers)] == sorted(numbers.values())  # in the order of the forwards
        failed = begun & refused
        assert {path.name for path in folder.glob("*.error")} == {f"{marker}.error" for marker in failed}
        assert all(json.loads((folder / f"{m}.error").read_text())["errno"] == errno.EISDIR for m in failed)
        assert len(list(folder.glob("*.safetensors"))) == len(published)
        assert (state.sequence, state.published, state.failed) == (len(published), len(published), len(failed))
        assert state.staged_bytes == 0
        assert state.staged_peak_bytes <= pool_bytes
        staging.close()
        counter.close()


def content(marker: Marker, go: int) -> torch.Tensor:
    """The ids of one go: small integers, exact in bf16, that differ from go to go."""
    return torch.arange(marker.tokens) % 100 + 3 * marker.index + go
