"""From a job file to a running server and back: `hsx serve`, spawned, becomes the reference engine."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.dump import SUFFIX, decode_header
from hsx.core.epoch import REPORT_NAME, report_from_json
from hsx.core.marker import Marker
from hsx.engines.process import descendants, process_alive
from hsx.engines.sglang import SGLangClient
from hsx.engines.spawn import SpawnOwner, SpawnPlan
from hsx.testing.commands import PATIENCE_S
from hsx.testing.jobs import write_job
from hsx.testing.servers import free_port

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
async def test_serve_spawn_prefill_stop(tmp_path: Path) -> None:
    """The record, the report, the answer and the dump belong to one epoch; a stop leaves no process."""
    port = free_port()
    job = write_job(tmp_path, {"engine": {"kind": "reference", "ownership": "spawn", "port": port}})
    plan = SpawnPlan(
        command=[sys.executable, "-m", "hsx", "serve", str(job)],
        args=["--chunked-prefill-size", "64", "--disable-radix-cache"],
        dump_dir=tmp_path / "dumps",
        log_file=tmp_path / "server.log",
    )
    owner, client, before = SpawnOwner(plan), SGLangClient("127.0.0.1", port), set(descendants(os.getpid()))
    try:
        record = await owner.start()
        assert (record.engine, record.port, record.layers) == ("reference", port, (1, 3))
        async with asyncio.timeout(PATIENCE_S):
            while not await client.answers():  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.02)
        folder = tmp_path / "dumps" / record.epoch
        report = report_from_json((folder / REPORT_NAME).read_text())
        assert (report.epoch, report.layers, report.hidden_size) == (record.epoch, (1, 3), 64)
        assert (await client.facts()).problems == ()
        marker = Marker("0000000a", 0, 1, 100)
        await client.prefill(marker, np.arange(100, dtype=np.int32), PATIENCE_S)
        raw = (folder / f"{marker}{SUFFIX}").read_bytes()
        header, _ = decode_header(raw, len(raw))
        assert (header.marker, header.epoch, header.spec) == (marker, record.epoch, report.spec)
    finally:
        await client.close()
        await owner.stop(PATIENCE_S)
    assert not process_alive(record)
    assert "ended with exit status 0" in await owner.ended()
    assert set(descendants(os.getpid())) <= before
