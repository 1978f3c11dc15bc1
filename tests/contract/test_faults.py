"""Every fault of the reference engine does what its row in the table says, and the invariants see those that they can see."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import TYPE_CHECKING

import pytest

from hsx.core.dump import ERROR_SUFFIX, SUFFIX
from hsx.core.invariants import Evidence, judge_answer, judge_dump
from hsx.dumps.measure import measure
from hsx.dumps.reader import MappedDump
from hsx.errors import EngineError, SampleError
from hsx.testing.engine_contract import PATIENCE_S, Served
from hsx.testing.faults import FAULTS, Faults
from hsx.testing.reference_model import ReferenceModel
from hsx.testing.servers import reference_server, running_reference

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsx.core.invariants import Answer
    from hsx.core.marker import Marker
    from hsx.engines.sglang import SGLangClient

TOKENS = 24

# What the invariants says of one sample's dump under each fault; None: it passes.
VERDICTS = {
    "retraction": "uncached",
    "dump_of_another_sample": "tokens_equal",
    "shifted_rows": "tokens_equal",
    "shifted_states": None,
    "states_of_another_sample": None,
    "last_chunk_missing": "tokens_equal",
    "chunk_doubled": "tokens_equal",
    "wrong_ids": "tokens_equal",
    "zero_layer": "nonzero_rows",
    "nan_row": "finite",
    "constant_rows": "not_repeated",
    "equal_layers": "not_repeated",
    "wrong_layer": None,
    "wrong_epoch": "epoch",
    "wrong_marker_inside": "expected",
    "cached_tokens": "uncached",
    "wrong_prompt_tokens": "prompt_tokens",
    "slow": None,
}
# What the client raises under each fault.
ERRORS = {
    "http_400": "request_refused",
    "http_500": "request_failed",
    "http_503": "server_full",
    "connection_reset_before": "request_failed",
    "connection_reset_after": "request_failed",
    "abort": "request_failed",
    "no_counts": "answer_invalid",
}
# Faults with a test of their own.
OTHERS = {
    *("hold", "hang", "die", "swapped_rows_between_two"),
    *("dump_late", "dump_never", "dump_twice", "truncated_file", "bad_header", "enospc", "sequence_reset", "sequence_gap"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One engine for all faults that it survives."""
    folder = tmp_path_factory.mktemp("faults")
    with running_reference(folder / "dumps") as server:
        yield Served(server, ReferenceModel(folder / "tiny-model"), 128)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[SGLangClient]:
    """A client; no fault is left armed afterwards."""
    client = served.server.client()
    yield client
    await served.server.clear_faults()
    await client.close()


def verdict(served: Served, marker: Marker, ids: NDArray[np.int32], answer: Answer | None) -> str | None:
    """The first violated invariant of a published dump, by the code that hsx itself uses."""
    dump = MappedDump(served.server.folder / f"{marker}{SUFFIX}")
    report = served.report
    content = measure(dump.states, dump.input_ids, ids)
    violation = judge_answer(marker, answer) if answer else None
    violation = violation or judge_dump(Evidence(marker, report.epoch, report.spec, report.hidden_size, dump.header, content))
    dump.close()
    return violation.invariant if violation else None


def test_every_fault_is_tested() -> None:
    """The tables here and the table of faults have the same rows; silent faults are those that the invariants passes."""
    assert sorted([*VERDICTS, *ERRORS, *OTHERS]) == sorted(FAULTS)
    silent = {kind for kind, fault in FAULTS.items() if fault.silent}
    assert silent == {kind for kind, found in VERDICTS.items() if found is None} - {"slow"}


@pytest.mark.parametrize("kind", sorted(VERDICTS))
async def test_verdict(served: Served, client: SGLangClient, kind: str) -> None:
    """The armed fault strikes the matching prompt once; the next one under the same fault's name is right again."""
    marker, ids = served.prompt(TOKENS, seed=3)
    await served.server.fault(kind, match=str(marker))
    answer = await client.prefill(marker, ids, PATIENCE_S)
    await served.dump(marker)
    assert verdict(served, marker, ids, answer) == VERDICTS[kind]
    after, ids = served.prompt(TOKENS, seed=3)
    answer = await client.prefill(after, ids, PATIENCE_S)
    await served.check(after, ids)
    assert verdict(served, after, ids, answer) is None


@pytest.mark.parametrize("kind", ["shifted_states", "states_of_another_sample", "wrong_layer"])
async def test_silent_fault_is_still_wrong(served: Served, client: SGLangClient, kind: str) -> None:
    """What no invariant of a sample sees differs from the truth by far more than rounding."""
    marker, ids = served.prompt(TOKENS, seed=3)
    await served.server.fault(kind, match=str(marker))
    await client.prefill(marker, ids, PATIENCE_S)
    with pytest.raises(AssertionError):
        await served.check(marker, ids)


@pytest.mark.parametrize("kind", sorted(ERRORS))
async def test_error(served: Served, client: SGLangClient, kind: str) -> None:
    """The client raises what the table says, for this prompt alone."""
    marker, ids = served.prompt(TOKENS)
    await served.server.fault(kind, match=str(marker))
    with pytest.raises((SampleError, EngineError)) as caught:
        await client.prefill(marker, ids, PATIENCE_S)
    assert caught.value.kind == ERRORS[kind]
    after, ids = served.prompt(TOKENS)
    await client.prefill(after, ids, PATIENCE_S)
    await served.check(after, ids)
    assert (str(marker) in served.names()) == (kind in {"connection_reset_after", "no_counts"})


async def test_two_prompts_swap_rows(served: Served, client: SGLangClient) -> None:
    """Two prompts of one batch each have some of the other's rows, and both are found out."""
    blocker, (one, ids), (two, _) = served.prompt(300), served.prompt(TOKENS, 41), served.prompt(TOKENS, 41)
    prompts = [(one, ids), (two, ids[::-1].copy())]
    await served.server.fault("hold", count=-1, match=str(blocker[0]))
    tasks = [asyncio.create_task(client.prefill(*blocker, PATIENCE_S))]
    while (await served.server.struck()).get("hold", 0) == 0:  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.01)
    tasks += [asyncio.create_task(client.prefill(marker, ids, PATIENCE_S)) for marker, ids in prompts]
    while await served.server.waiting() < 2:  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.01)
    # Both stand in the queue behind the blocker: they travel in one batch once it is let go.
    await served.server.fault("swapped_rows_between_two", match="-41-")
    await served.server.clear_faults("hold")
    await asyncio.gather(*tasks)
    assert (await served.server.struck())["swapped_rows_between_two"] == 1
    for marker, ids in prompts:
        await served.dump(marker)
        assert verdict(served, marker, ids, None) == "tokens_equal"


async def test_late_and_missing_dumps(served: Served, client: SGLangClient) -> None:
    """One dump comes after its answer; another never."""
    (late, ids), (never, _) = served.prompt(TOKENS), served.prompt(TOKENS)
    await served.server.fault("dump_late", match=str(late), value=0.2)
    await served.server.fault("dump_never", match=str(never))
    await client.prefill(late, ids, PATIENCE_S)
    await client.prefill(never, ids, PATIENCE_S)
    await served.check(late, ids)
    assert str(never) not in served.names()


async def test_sequences(served: Served, client: SGLangClient) -> None:
    """A doubled dump has the next sequence, a gap leaves one out, a reset starts at 1 again."""
    sequences = []
    for kind in (None, "dump_twice", "sequence_gap", "sequence_reset", None):
        marker, ids = served.prompt(TOKENS)
        if kind:
            await served.server.fault(kind, match=str(marker))
        await client.prefill(marker, ids, PATIENCE_S)
        sequences.append((await served.check(marker, ids)).sequence)
    first = sequences[0]
    assert sequences == [first, first + 2, first + 4, 1, first + 6]


@pytest.mark.parametrize("kind", ["truncated_file", "bad_header"])
async def test_broken_files(served: Served, client: SGLangClient, kind: str) -> None:
    """A torn file and a spoilt header are no dumps."""
    marker, ids = served.prompt(TOKENS)
    await served.server.fault(kind, match=str(marker))
    await client.prefill(marker, ids, PATIENCE_S)
    with pytest.raises(SampleError) as caught:
        await served.dump(marker)
    assert caught.value.kind == "dump_invalid"


async def test_full_tmpfs(served: Served, client: SGLangClient) -> None:
    """In the dump's place there is an error file that says why."""
    marker, ids = served.prompt(TOKENS)
    await served.server.fault("enospc", match=str(marker))
    await client.prefill(marker, ids, PATIENCE_S)
    note = json.loads((served.server.folder / f"{marker}{ERROR_SUFFIX}").read_text())
    assert note["errno"] == errno.ENOSPC
    assert note["marker"] == str(marker)
    assert str(marker) not in served.names()


async def test_faults_are_refused_by_name(served: Served, client: SGLangClient) -> None:
    """An unknown fault is refused with the names there are."""
    with pytest.raises(ValueError, match="dump_never"):
        await served.server.fault("no_such_fault")
    assert await client.answers()


@pytest.mark.slow
async def test_death_in_the_middle(tmp_path: Path) -> None:
    """The process kills itself: the request is lost, the port is closed, no dump."""
    async with reference_server(tmp_path / "dumps") as server:
        served, client = Served(server, ReferenceModel(tmp_path / "tiny-model"), 128), server.client()
        marker, ids = served.prompt(300)
        await server.fault("die")
        with pytest.raises(SampleError, match="lost"):
            await client.prefill(marker, ids, PATIENCE_S)
        assert server.process.wait(PATIENCE_S) == -9
        assert not await client.answers()
        assert served.names() == set()
        await client.close()


@pytest.mark.slow
async def test_hang(tmp_path: Path) -> None:
    """Nothing is finished any more, while the server goes on saying that it is well."""
    async with reference_server(tmp_path / "dumps") as server:
        served, client = Served(server, ReferenceModel(tmp_path / "tiny-model"), 128), server.client()
        await server.fault("hang")
        for _ in range(2):
            marker, ids = served.prompt(TOKENS)
            with pytest.raises(SampleError) as caught:
                await client.prefill(marker, ids, 0.3)
            assert caught.value.kind == "request_timeout"
        assert await client.answers()
        assert served.names() == set()
        await client.close()


def test_counting() -> None:
    """A fault strikes as often as it says, where it matches; -1 never runs out; clearing disarms."""
    faults = Faults()
    faults.arm("dump_never", count=2, match="-7-")
    faults.arm("dump_late", count=-1)
    assert faults.take("dump_never", "hsx1-00000000-8-1-3") is None
    assert [bool(faults.take("dump_never", "hsx1-00000000-7-1-3")) for _ in range(3)] == [True, True, False]
    assert all(faults.take("dump_late", "any") for _ in range(5))
    assert faults.armed("dump_late", "any")
    faults.clear()
    assert not faults.armed("dump_late", "any")
    assert faults.struck() == {"dump_never": 2, "dump_late": 5}
    for count in (0, -2):
        with pytest.raises(ValueError, match="count"):
            faults.arm("dump_never", count=count)
