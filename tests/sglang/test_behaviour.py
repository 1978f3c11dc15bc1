"""The plugin among the server's other habits: foreign requests, aborts, wrong markers, decoding; one server for all."""

from __future__ import annotations

import asyncio
import fcntl
import json
import urllib.request
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.capture.report import read_norm
from hsx.core.epoch import LOCK_NAME, SHM_NAME, STATE_NAME, record_from_json, state_from_json
from hsx.core.marker import Marker
from hsx.engines.process import descendants, start_ticks
from hsx.testing.capture_server import CaptureServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hsx.core.epoch import CaptureState
    from hsx.testing.tiny_models import Kind

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1200)]

IDS = np.random.default_rng(7).integers(5, 1000, 3000).astype(np.int32)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[Kind], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def server(sglang_python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaptureServer]:
    with CaptureServer(sglang_python, tmp_path_factory.mktemp("server"), model, (2, 5)) as running:
        yield running


def marker(index: int, tokens: int) -> Marker:
    return Marker("beefbeef", index, 1, tokens)


def names(server: CaptureServer) -> set[str]:
    """The files of the epoch's folder that requests can make: `shm.json` is kept beside them by the processes above the server,
    at any time."""
    return {path.name for path in server.dumps.iterdir() if not path.name.startswith(SHM_NAME)}


def test_record_and_report(server: CaptureServer, model: Path) -> None:
    from safetensors import safe_open

    record = record_from_json((server.dumps / "server.json").read_text())
    assert (record.epoch, record.port, record.engine_version) == (server.epoch, server.port, "0.5.23")
    with safe_open(model / "model.safetensors", "np") as file:
        wanted = file.get_tensor("model.norm.weight")
    found = read_norm(server.dumps, server.report())
    assert found is not None
    assert np.array_equal(found, wanted)
    assert server.report().norm_eps == 1e-6


def test_record_names_the_server_process(server: CaptureServer) -> None:
    record = record_from_json((server.dumps / "server.json").read_text())
    assert start_ticks(record.pid) == record.start_ticks


def test_foreign_requests_leave_nothing(server: CaptureServer) -> None:
    before = names(server)
    asyncio.run(server.generate({"0" * 32: IDS[:200], "hsx1-beefbeef-01-1-5": IDS[:5]}))
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health_generate") as answer:  # a forward of its own
        assert answer.status == 200
    assert names(server) == before


def test_state_file_counts(server: CaptureServer) -> None:
    """Each kind of request is counted once it is answered, by the process that captures."""

    def state() -> CaptureState:
        return state_from_json((server.dumps / STATE_NAME).read_text())

    before = state()
    mine, broken = [marker(200 + i, 300 + i) for i in range(3)], marker(203, 10)
    asyncio.run(server.generate({**{str(m): IDS[: m.tokens] for m in mine}, "other": IDS[:300], str(broken): IDS[:20]}))
    after = state()
    assert after == replace(
        before,
        sequence=before.sequence + 3,
        published=before.published + 3,
        foreign=before.foreign + 2,  # the fence behind them included
        failed=before.failed + 1,
        staged_peak_bytes=after.staged_peak_bytes,
        forward_us=after.forward_us,
        forwards=after.forwards,
    )
    assert 0 < before.forward_us < after.forward_us
    assert before.forwards < after.forwards
    assert after.staged_peak_bytes > 0
    assert after.sequence == after.published == max(server.dump(m)[0].sequence for m in mine)
    record = record_from_json((server.dumps / "server.json").read_text())
    assert after.epoch == record.epoch
    assert after.pid in descendants(record.pid)
    assert after.start_ticks == start_ticks(after.pid)
    assert (server.dumps / LOCK_NAME).read_text() == f"pid {after.pid}\n"
    with (server.dumps / LOCK_NAME).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_foreign_and_marked_requests_share_batches(server: CaptureServer) -> None:
    mine = {marker(100 + i, 40 + i): IDS[i : 40 + 2 * i] for i in range(12)}
    foreign = {f"other-{i}": IDS[300 + i : 390] for i in range(12)}
    asyncio.run(server.generate({**{str(m): ids for m, ids in mine.items()}, **foreign}))
    for one, ids in mine.items():
        assert np.array_equal(server.dump(one)[2], ids)


def test_decoding_afterwards_adds_nothing(server: CaptureServer) -> None:
    one = marker(1, 20)
    asyncio.run(server.generate({str(one): IDS[:20]}, new_tokens=1))
    many = marker(2, 20)
    asyncio.run(server.generate({str(many): IDS[:20]}, new_tokens=8))
    assert np.array_equal(server.dump(one)[1], server.dump(many)[1])


def test_prompt_longer_than_its_marker_is_an_error(server: CaptureServer) -> None:
    short = marker(3, 20)
    asyncio.run(server.generate({str(short): IDS[:25]}))
    note = json.loads((server.dumps / f"{short}.error").read_text())
    assert note["reason"] == "a chunk ends at token 25; expected at most 20"
    assert f"{short}.safetensors" not in names(server)


def test_prompt_shorter_than_its_marker_is_no_dump(server: CaptureServer) -> None:
    long = marker(4, 30)
    asyncio.run(server.generate({str(long): IDS[:25]}))
    assert f"{long}.safetensors" not in names(server)
    asyncio.run(server.generate({f"later-{i}": IDS[: 200 + i] for i in range(20)}))
    assert f"{long}.part" not in names(server)


def test_abort_leaves_neither_dump_nor_part(server: CaptureServer) -> None:
    long = marker(5, 3000)

    async def begin_and_abort() -> dict[str, dict[str, object]]:
        running = asyncio.create_task(server.generate({str(long): IDS}))
        while f"{long}.part" not in names(server) and not running.done():  # noqa: ASYNC110 - the event is in another process
            await asyncio.sleep(0.001)
        body = json.dumps({"rid": str(long)}).encode()
        url = f"http://127.0.0.1:{server.port}/abort_request"
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        (await asyncio.to_thread(urllib.request.urlopen, request)).close()
        return await running

    meta = asyncio.run(begin_and_abort())[str(long)]
    finish = meta["finish_reason"]
    assert isinstance(finish, dict)
    aborted = finish["type"] == "abort"
    asyncio.run(server.generate({f"after-{i}": IDS[: 200 + i] for i in range(20)}))
    # A fast machine may finish the prefill before the abort comes; then there must be a whole dump.
    assert (f"{long}.safetensors" in names(server)) != aborted
    assert f"{long}.part" not in names(server)


def test_full_dump_directory_costs_the_marker_only(server: CaptureServer) -> None:
    """A folder stands where the partial file should: the write fails as on a full disk, the server goes on."""
    blocked, free = marker(6, 30), marker(7, 30)
    (server.dumps / f"{blocked}.part").mkdir()
    asyncio.run(server.generate({str(blocked): IDS[:30], str(free): IDS[:30]}))
    assert "IsADirectoryError" in (server.dumps / f"{blocked}.error").read_text()
    assert np.array_equal(server.dump(free)[2], IDS[:30])


def test_same_prompt_twice_gives_the_same_dump(server: CaptureServer) -> None:
    """With the radix cache off the second prefill computes everything again; in other company the rounding may differ."""
    first, second = marker(8, 300), marker(9, 300)
    asyncio.run(server.generate({str(first): IDS[:300]}))
    asyncio.run(server.generate({str(second): IDS[:300]}))
    a, b = server.dump_float32(first), server.dump_float32(second)
    assert (np.linalg.norm(a - b, axis=-1) / np.linalg.norm(a, axis=-1)).max() < 1e-5


def test_nothing_stays_staged(server: CaptureServer) -> None:
    """After everything that the tests above did, aborts included."""
    (state,) = server.states()
    assert state.staged_bytes == 0
    assert 0 < state.staged_peak_bytes <= 1 << 30
