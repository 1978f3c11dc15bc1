"""Forwards in, dumps out; and every fault ends as an error file, never as an exception."""

from __future__ import annotations

import errno
import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hsx.capture.calls import DumpsHere
from hsx.capture.counter import Counter
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.pool import Pool
from hsx.capture.session import Batch, Session
from hsx.capture.staging import Staging
from hsx.capture.unrounded import Unrounded
from hsx.core.epoch import LOCK_NAME, STATE_NAME, CaptureState, state_from_json
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.dumps.reader import MappedDump

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SPEC = CaptureSpec((1, 3), "post_norm")
WIDTH = 8
FOREVER_S = 300.0
LONG, SHORT = Marker("0a0b0c0d", 0, 1, 10), Marker("0a0b0c0d", 1, 1, 3)


def model(ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """States that tell token and layer apart: every value is a small integer, exact in bf16."""
    base = ids.float()[:, None].repeat(1, WIDTH)
    return [base + 1, base + 2], base + 3


def expected(ids: torch.Tensor) -> torch.Tensor:
    aux, final = model(ids)
    return torch.stack([*aux, final], 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "epoch").mkdir()
    return tmp_path / "epoch"


@pytest.fixture
def counter(folder: Path) -> Iterator[Counter]:
    counter = Counter(folder, "epoch")
    yield counter
    counter.close()


@pytest.fixture
def staging(folder: Path, tmp_path: Path, counter: Counter) -> Iterator[Staging]:
    writer = DumpWriter(folder, "epoch", SPEC, WIDTH, "model", "test 1")
    pool = Pool(1 << 20, SPEC.states, WIDTH, torch.float32)
    staging = Staging(DumpsHere(writer), counter, pool, Unrounded(tmp_path / "float32", SPEC.states, WIDTH))
    yield staging
    staging.close()


class Waiting(Session):
    """Waits for the writer thread after each step, so that what it did can be looked at."""

    def __init__(self, staging: Staging, layers: int) -> None:
        super().__init__(staging, layers)
        self.staging = staging

    def begin(
        self, rids: Sequence[str], prefix_lens: Sequence[int], extend_lens: Sequence[int], input_ids: torch.Tensor | None
    ) -> Batch | None:
        batch = super().begin(rids, prefix_lens, extend_lens, input_ids)
        self.wait()
        return batch

    def finish(self, batch: Batch) -> None:
        super().finish(batch)
        self.wait()

    def save(self, spent_ns: int = 0) -> None:
        super().save(spent_ns)
        self.wait()

    def wait(self) -> None:
        assert self.staging.flush(FOREVER_S)
        assert self.staging.pool.staged_bytes == 0


@pytest.fixture
def session(staging: Staging) -> Session:
    return Waiting(staging, len(SPEC.layers))


def run(session: Session, chunks: list[tuple[Marker | str, int, torch.Tensor]], padding: int = 0) -> None:
    ids = torch.cat([ids for _, _, ids in chunks] + [torch.zeros(padding, dtype=torch.int64)])
    batch = session.begin([str(m) for m, _, _ in chunks], [o for _, o, _ in chunks], [len(i) for _, _, i in chunks], ids)
    if batch is not None:
        aux, final = model(ids)
        ids += 100  # the server may overwrite its ids after the batch was read
        session.tensors(batch, aux, final)
        session.finish(batch)
    session.save()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in (LOCK_NAME, STATE_NAME))


def counts(folder: Path) -> tuple[int, int, int, int, int]:
    """sequence, published, failed, foreign, incomplete"""
    state = state_from_json((folder / STATE_NAME).read_text())
    assert isinstance(state, CaptureState)
    return state.sequence, state.published, state.failed, state.foreign, state.incomplete


def reason(folder: Path, marker: Marker) -> str:
    return str(json.loads((folder / f"{marker}.error").read_text())["reason"])


def test_chunks_of_two_requests_and_a_foreign_one(session: Session, folder: Path, tmp_path: Path) -> None:
    long, short = torch.arange(10), torch.arange(20, 23)
    run(session, [("warm-up", 0, torch.arange(5)), (LONG, 0, long[:4])], padding=3)
    run(session, [(LONG, 4, long[4:]), (SHORT, 0, short)])
    numbers = set()
    for marker, ids in ((LONG, long), (SHORT, short)):
        dump = MappedDump(folder / f"{marker}.safetensors")
        assert dump.input_ids.tolist() == ids.tolist()
        states = torch.from_numpy(dump.states.copy().view(np.int16)).view(torch.bfloat16)
        assert torch.equal(states.float(), expected(ids))
        assert np.array_equal(np.load(tmp_path / "float32" / f"{marker}.npy"), expected(ids).numpy())
        numbers.add(dump.header.sequence)
        dump.close()
    assert numbers == {1, 2}
    assert counts(folder) == (2, 2, 0, 1, 0)
    assert len(names(folder)) == 2


def test_cached_prefix_leaves_an_error(session: Session, folder: Path) -> None:
    run(session, [(LONG, 9, torch.arange(1))])
    assert names(folder) == [f"{LONG}.error"]
    assert counts(folder) == (0, 0, 1, 0, 0)
    assert "cached prefix" in reason(folder, LONG)


def test_gap_removes_the_part(session: Session, folder: Path) -> None:
    run(session, [(LONG, 0, torch.arange(4))])
    assert names(folder) == [f"{LONG}.part"]
    run(session, [(LONG, 6, torch.arange(4))])
    assert names(folder) == [f"{LONG}.error"]


def test_retraction_starts_again(session: Session, folder: Path) -> None:
    ids = torch.arange(10)
    run(session, [(LONG, 0, ids[:6] + 50)])
    run(session, [(LONG, 0, ids[:5])])
    run(session, [(LONG, 5, ids[5:])])
    dump = MappedDump(folder / f"{LONG}.safetensors")
    assert dump.input_ids.tolist() == ids.tolist()
    dump.close()


def test_rerun_of_a_published_marker_changes_nothing(session: Session, folder: Path) -> None:
    run(session, [(SHORT, 0, torch.arange(3))])
    before = (folder / f"{SHORT}.safetensors").read_bytes()
    run(session, [(SHORT, 0, torch.arange(3) + 9)])
    assert (folder / f"{SHORT}.safetensors").read_bytes() == before
    assert names(folder) == [f"{SHORT}.safetensors"]
    assert counts(folder) == (1, 1, 0, 0, 0)


def test_one_marker_that_cannot_be_written_costs_no_other(session: Session, folder: Path) -> None:
    (folder / f"{LONG}.part").mkdir()
    run(session, [(LONG, 0, torch.arange(10)), (SHORT, 0, torch.arange(3))])
    assert reason(folder, LONG).startswith("IsADirectoryError")
    assert (folder / f"{SHORT}.safetensors").exists()


def test_lost_folder_is_survived(session: Session, folder: Path) -> None:
    shutil.rmtree(folder)
    run(session, [(SHORT, 0, torch.arange(3))])
    folder.mkdir()
    run(session, [(LONG, 0, torch.arange(10))])
    assert names(folder) == [f"{LONG}.safetensors"]
    assert counts(folder) == (1, 1, 0, 0, 1)


def test_forward_without_tensors_fails_its_markers(session: Session, folder: Path) -> None:
    batch = session.begin([str(SHORT)], [0], [3], torch.arange(3))
    assert batch is not None
    session.finish(batch)
    assert "the forward showed no states" in reason(folder, SHORT)


def test_a_forward_that_did_not_return_fails_its_markers(session: Session, folder: Path) -> None:
    """The prompt's next chunk begins where that one should have ended: it would be published with a hole."""
    ids = torch.arange(1, 11)
    run(session, [(LONG, 0, ids[:4])])
    assert session.begin([str(LONG)], [4], [3], ids[4:7]) is not None
    run(session, [(SHORT, 0, torch.arange(3))])
    run(session, [(LONG, 7, ids[7:])])
    assert "did not return" in reason(folder, LONG)
    assert names(folder) == sorted([f"{LONG}.error", f"{SHORT}.safetensors"])


def test_tensors_of_another_shape_fail_their_markers(session: Session, folder: Path) -> None:
    batch = session.begin([str(SHORT)], [0], [3], torch.arange(3))
    assert batch is not None
    session.tensors(batch, [torch.zeros(3, WIDTH)], torch.zeros(3, WIDTH))
    session.finish(batch)
    assert reason(folder, SHORT) == "ValueError: the model gave 1 layers; expected 2"


def test_missing_final_state_fails(session: Session, folder: Path) -> None:
    batch = session.begin([str(SHORT)], [0], [3], torch.arange(3))
    assert batch is not None
    session.tensors(batch, [torch.zeros(3, WIDTH)] * 2, None)
    session.finish(batch)
    assert "final norm" in reason(folder, SHORT)


@pytest.mark.parametrize("ids", [None, torch.arange(2), torch.zeros(3, 3)])
def test_missing_ids_fail(session: Session, folder: Path, ids: torch.Tensor | None) -> None:
    assert session.begin([str(SHORT)], [0], [3], ids) is None
    assert "no input ids for its 3 tokens" in reason(folder, SHORT)


def test_batch_of_another_form_fails_its_markers(session: Session, folder: Path) -> None:
    assert session.begin([str(SHORT), str(LONG)], [0], [3], torch.arange(3)) is None
    assert reason(folder, SHORT).startswith("ValueError")
    assert reason(folder, LONG).startswith("ValueError")


def test_vanished_request_leaves_no_file(session: Session, folder: Path) -> None:
    run(session, [(LONG, 0, torch.arange(4))])
    for turn in range(40):
        run(session, [(f"other-{turn}", 0, torch.arange(2))])
    assert names(folder) == []
    assert counts(folder) == (0, 0, 0, 40, 1)


def test_states_shown_twice_fail(session: Session, folder: Path) -> None:
    batch = session.begin([str(SHORT)], [0], [3], torch.arange(3))
    assert batch is not None
    for _ in range(2):
        session.tensors(batch, *model(torch.arange(3)))
    session.finish(batch)
    assert "showed its states twice" in reason(folder, SHORT)
    assert names(folder) == [f"{SHORT}.error"]


def test_the_time_of_each_forward_is_told(session: Session, folder: Path) -> None:
    for spent in (5_000, 7_000):
        session.begin(["other"], [0], [1], torch.arange(1))
        session.save(spent)
    state = state_from_json((folder / STATE_NAME).read_text())
    assert (state.forwards, state.forward_us, state.blocked_us, state.staged_bytes) == (2, 12, 0, 0)


def test_a_piece_that_cannot_be_prepared_costs_its_marker_alone(
    session: Session, folder: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts that are whole in one slab, and are seen to at once."""
    markers = [Marker("0a0b0c0d", index, 1, 3) for index in range(3)]
    aid = staging._unrounded
    assert aid is not None
    publish = aid.publish

    def refuse(marker: Marker) -> None:
        if marker == markers[1]:
            raise OSError(errno.EIO, "Input/output error")
        publish(marker)

    monkeypatch.setattr(aid, "publish", refuse)
    run(session, [(marker, 0, torch.arange(3)) for marker in markers])
    assert names(folder) == sorted(f"{m}.{'error' if m == markers[1] else 'safetensors'}" for m in markers)
    assert counts(folder) == (2, 2, 1, 0, 0)
    assert reason(folder, markers[1]) == "OSError: [Errno 5] Input/output error"
