"""The dump directory is full and nobody empties it: the server keeps answering, and each marker gets an error for a dump."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.marker import Marker
from hsx.testing.capture_server import CaptureServer
from hsx.testing.mounts import tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.tiny_models import Kind

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]

IDS = np.random.default_rng(11).integers(5, 1000, 500).astype(np.int32)
MEGABYTES = 4
ROUNDS = 3


def markers(attempt: int, count: int) -> list[Marker]:
    return [Marker("f0110f0d", index, attempt, 500) for index in range(count)]


def test_capture_without_a_consumer(
    sglang_python: Path, tiny_model: Callable[[Kind], Path], tmp_path: Path, private_disks: None
) -> None:
    model = tiny_model("llama")
    server = CaptureServer(
        sglang_python,
        tmp_path / "job",
        model,
        (2, 5),
        variables={"HSX_CAPTURE_FLOAT32": ""},
        settings={"staging_bytes": "1MiB"},
    )
    # The server is started inside the private mount namespace, and so is the test: nobody else sees this tmpfs.
    with tmpfs(tmp_path / "job" / "dumps", f"size={MEGABYTES}m") as dumps, server:
        # A dump of 500 tokens takes 1.5 to 2 kB a token: more of them than the tmpfs holds.
        size, count = 0, 12
        for attempt in range(1, ROUNDS + 1):
            sent = markers(attempt, count)
            metas = asyncio.run(server.generate({str(m): IDS for m in sent}, settle=False))
            assert {meta["finish_reason"]["type"] for meta in metas.values()} == {"length"}
            fine: list[Marker] = []
            failed: list[Marker] = []
            for marker in sent:
                (fine if server.ended(marker) else failed).append(marker)
            assert failed, f"{count} dumps fit into {MEGABYTES} MB"
            for marker in failed:
                note = (server.dumps / f"{marker}.error").read_text()
                # Empty where there was not even room for the reason.
                assert not note or (json.loads(note)["errno"], "No space left" in json.loads(note)["reason"]) == (28, True)
            for marker in fine:
                assert np.array_equal(server.dump(marker)[2], IDS)
                size = (server.dumps / f"{marker}.safetensors").stat().st_size
        assert not list(server.dumps.glob("*.part"))
        assert size * count > MEGABYTES << 20
        # Room again: it goes on, and its account is right.
        for path in [*dumps.glob("*/*.safetensors"), *dumps.glob("*/*.error")]:
            path.unlink()
        again = markers(ROUNDS + 1, 2)
        asyncio.run(server.generate({str(m): IDS for m in again}))
        numbers = sorted(server.dump(m)[0].sequence for m in again)
        (state,) = server.states()
        assert numbers == [state.sequence - 1, state.sequence]
        assert (state.published + state.failed + state.incomplete, state.staged_bytes) == (ROUNDS * count + 2, 0)
        assert state.staged_peak_bytes <= 1 << 20
