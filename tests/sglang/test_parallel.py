"""Parallel servers, for real: tensor parallelism, data-parallel replicas and DP attention give what one process gives.

Every prompt equals Hugging Face in float32, whatever the chunks; each DP rank has one writer, with numbers of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hsx.core.epoch import lock_name, report_from_json, report_name, state_from_json, state_name
from hsx.testing.capture_server import CaptureServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hsx.core.epoch import CaptureState
    from hsx.testing.tiny_models import Kind

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]

TP, DP = ("--tp-size", "2"), ("--dp-size", "2")
DP_ATTENTION = (*TP, *DP, "--enable-dp-attention")
VARIABLES = {"HSX_TEST_MLA_ON_CPU": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
"""Both processes on one core: SGLang wants to know where each runs, and this is there on every machine."""


@dataclass(frozen=True)
class Case:
    """`arguments` for a server of `kind`, with `ranks` DP ranks of `tp` processes each."""

    kind: Kind
    arguments: tuple[str, ...]
    chunk: int
    ranks: int = 1
    tp: int = 1
    retract: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{''.join(self.arguments)}-{self.chunk}{'-retract' if self.retract else ''}"


CASES = [
    Case("llama", TP, 37, tp=2),
    Case("llama", TP, 128, tp=2, retract=True),
    Case("dsv3", TP, 37, tp=2),
    Case("llama", DP, 37, ranks=2),
    Case("dsv3", DP_ATTENTION, 64, ranks=2),
]


def states_of(server: CaptureServer, ranks: int) -> list[CaptureState]:
    return [state_from_json((server.dumps / state_name(rank)).read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parallel_servers_capture_what_hugging_face_computes(
    case: Case,
    tmp_path: Path,
    sglang_python: Path,
    tiny_model: Callable[[Kind], Path],
    samples: Any,
    judge: Callable[[Path, Sequence[int], str], Any],
) -> None:
    model, prompts = tiny_model(case.kind), samples(16, 400, 1000, 2)
    variables = {**VARIABLES, **({"SGLANG_TEST_RETRACT": "1"} if case.retract else {})}
    arguments = (*case.arguments, "--chunked-prefill-size", str(case.chunk))
    server = CaptureServer(sglang_python, tmp_path, model, (2, 5), arguments=arguments, variables=variables)
    with server:
        asyncio.run(server.generate({str(marker): ids for marker, ids in prompts.items()}, new_tokens=8 * case.retract))

        async def all_there() -> None:
            async with asyncio.timeout(60):
                while not all((server.dumps / f"{marker}.safetensors").exists() for marker in prompts):  # noqa: ASYNC110 - files
                    await asyncio.sleep(0.05)

        asyncio.run(all_there())
        counted = states_of(server, case.ranks)
    reports = [report_from_json((server.dumps / report_name(rank)).read_text()) for rank in range(case.ranks)]
    assert [(r.rank, r.dp_size, r.tp_size) for r in reports] == [(rank, case.ranks, case.tp) for rank in range(case.ranks)]
    assert not (server.dumps / lock_name(case.ranks)).exists()
    assert len({state.pid for state in counted}) == case.ranks
    given: list[list[int]] = [[] for _ in range(case.ranks)]
    figures = judge(model, (2, 5), "post_norm")
    for marker, ids in prompts.items():
        header, stored, found = server.dump(marker)
        assert np.array_equal(found, ids)
        given[header.rank].append(header.sequence)
        figures.look(ids, server.dump_float32(marker), stored)
    assert [sorted(numbers) for numbers in given] == [list(range(1, len(numbers) + 1)) for numbers in given]
    assert all(given)
    assert [state.failed for state in counted] == [0] * case.ranks
    assert not list(server.dumps.glob("*.part"))
    print(figures)  # noqa: T201 - the figures are the result of this test; pytest shows them with -rP
    assert figures.worst_capture < 1e-4
    assert figures.worst_stored < 2.0**-8
    assert figures.nearest_ratio > 10
