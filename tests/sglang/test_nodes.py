"""Tensor parallelism over two nodes, for real: two `hsx serve` of one server, each with a dump directory of its own.

Both are on this machine, as nodes of a server may be; what a rank knows of the other goes through the network all the same.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hsx.core.epoch import REPORT_NAME, report_from_json
from hsx.testing.capture_server import RANKS_VARIABLES, CaptureServer
from hsx.testing.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hsx.testing.tiny_models import Kind

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_first_node_writes_what_hugging_face_computes(
    tmp_path: Path,
    sglang_python: Path,
    tiny_model: Callable[[Kind], Path],
    samples: Any,
    judge: Callable[[Path, Sequence[int], str], Any],
) -> None:
    model, prompts = tiny_model("llama"), samples(16, 400, 1000, 2)
    together = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}")
    nodes = [
        CaptureServer(
            sglang_python,
            tmp_path / f"node-{rank}",
            model,
            (2, 5),
            arguments=(*together, "--node-rank", str(rank)),
            variables=RANKS_VARIABLES,
        )
        for rank in range(2)
    ]
    first, second = nodes
    with ThreadPoolExecutor(2) as pool:
        try:
            list(pool.map(CaptureServer.start, nodes))  # neither is ready before the other is there
            asyncio.run(first.generate({str(marker): ids for marker, ids in prompts.items()}))
        finally:
            list(pool.map(CaptureServer.stop, nodes))
    report = report_from_json((first.dumps / REPORT_NAME).read_text())
    assert (report.tp_size, report.dp_size, report.rank) == (2, 1, 0)
    # The other node has neither a report nor a refusal, and no dump.
    assert [path.name for path in second.dumps.iterdir()] == ["server.json"]
    figures = judge(model, (2, 5), "post_norm")
    for marker, ids in prompts.items():
        _, stored, found = first.dump(marker)
        assert np.array_equal(found, ids)
        figures.look(ids, first.dump_float32(marker), stored)
    assert figures.worst_capture < 1e-4
    assert figures.worst_stored < 2.0**-8
    assert figures.nearest_ratio > 10
