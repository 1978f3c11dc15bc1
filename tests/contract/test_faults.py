"""Every fault of the reference engine does what its row in the table says, and the invariants see those that they can see."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import aiohttp
import pytest

from hsx.core.dump import ERROR_SUFFIX, SUFFIX
from hsx.core.epoch import RECORD_NAME, RECORD_VARIABLE, REFUSAL_NAME, STATE_NAME, state_from_json
from hsx.core.invariants import Evidence, judge_answer, judge_dump
from hsx.dumps.measure import measure
from hsx.dumps.reader import MappedDump
from hsx.engines.sglang import SGLangClient
from hsx.errors import EngineError, SampleError
from hsx.testing.commands import delete_in_use
from hsx.testing.engine_contract import PATIENCE_S, Served
from hsx.testing.faults import FAULTS, Faults
from hsx.testing.reference_engine import main
from hsx.testing.reference_model import ReferenceModel
from hsx.testing.servers import free_port, reference_server, running, running_reference, tiny_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsx.core.epoch import CaptureState
    from hsx.core.invariants import Answer
    from hsx.core.marker import Marker

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
    "answer_cut": "request_failed",
    "abort": "request_failed",
    "no_counts": "answer_invalid",
}
# Faults with a test of their own.
OTHERS = {
    *("hold", "hang", "die", "swapped_rows_between_two", "connection_reset_during"),
    *(
        "dump_late",
        "dump_withheld",
        "dump_never",
        "dump_vanishes",
        "dump_twice",
        "never_sent",
        "truncated_file",
        "bad_header",
        "enospc",
    ),
    *("sequence_reset", "sequence_gap", "sequence_repeat"),
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


def state(served: Served) -> CaptureState:
    """The engine's state file."""
    return state_from_json((served.server.folder / STATE_NAME).read_text())


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
    assert (str(marker) in served.names()) == (kind in {"connection_reset_after", "answer_cut", "no_counts"})


async def test_connection_reset_in_the_middle_of_a_prefill(served: Served, client: SGLangClient) -> None:
    """The client loses its answer while the prompt is under way; the prompt goes on to its dump, which is right."""
    marker, ids = served.prompt(300)
    await served.server.fault("hold", count=-1, match=str(marker))
    await served.server.fault("connection_reset_during", match=str(marker))
    with pytest.raises(SampleError) as caught:
        await client.prefill(marker, ids, PATIENCE_S)
    assert caught.value.kind == "request_failed"
    assert str(marker) not in served.names()
    await served.server.clear_faults("hold")
    await served.check(marker, ids)


async def test_two_prompts_swap_rows(served: Served, client: SGLangClient) -> None:
    """Two prompts of one batch each have some of the other's rows, and both are found out."""
    blocker, (one, ids), (two, _) = served.prompt(300), served.prompt(TOKENS, 41), served.prompt(TOKENS, 41)
    prompts, before = [(one, ids), (two, ids[::-1].copy())], (await served.server.struck()).get("hold", 0)
    await served.server.fault("hold", count=-1, match=str(blocker[0]))
    tasks = [asyncio.create_task(client.prefill(*blocker, PATIENCE_S))]
    while (await served.server.struck()).get("hold", 0) == before:  # noqa: ASYNC110 - another process's state
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


async def test_a_dump_is_withheld_until_it_is_let_go(served: Served, client: SGLangClient) -> None:
    """Of two, the one that is let go comes, numbered then; the other stays away."""
    (one, ids), (other, _) = served.prompt(TOKENS), served.prompt(TOKENS)
    before = state(served).sequence
    for marker in (one, other):
        await served.server.fault("dump_withheld", count=-1, match=str(marker))
        await client.prefill(marker, ids, PATIENCE_S)
    (between, _) = served.prompt(TOKENS)
    await client.prefill(between, ids, PATIENCE_S)
    assert (await served.check(between, ids)).sequence == before + 1
    assert not {str(one), str(other)} & served.names()
    await served.server.clear_faults("dump_withheld", str(one))
    assert (await served.check(one, ids)).sequence == before + 2
    assert str(other) not in served.names()
    await served.server.clear_faults("dump_withheld")
    assert (await served.check(other, ids)).sequence == before + 3


async def test_sequences(served: Served, client: SGLangClient) -> None:
    """A doubled dump has the next sequence, a gap leaves one out, a reset starts at 1, a repeat is the one before again."""
    sequences = []
    for kind in (None, "dump_twice", "sequence_gap", "sequence_reset", "dump_never", None, "sequence_repeat", None):
        marker, ids = served.prompt(TOKENS)
        if kind:
            await served.server.fault(kind, match=str(marker))
        await client.prefill(marker, ids, PATIENCE_S)
        if kind != "dump_never":
            sequences.append((await served.check(marker, ids)).sequence)
    first = sequences[0]
    assert sequences == [first, first + 2, first + 4, 1, first + 6, first + 6, first + 7]


async def test_what_is_counted(served: Served, client: SGLangClient) -> None:
    """Each fault leaves its own trace in the difference of the state file before and after."""
    deltas = {}
    for kind in (None, "dump_never", "dump_vanishes", "dump_twice", "never_sent", "sequence_gap", "enospc", "abort"):
        marker, ids = served.prompt(TOKENS)
        before = state(served)
        if kind:
            await served.server.fault(kind, match=str(marker))
        with suppress(SampleError):
            await client.prefill(marker, ids, PATIENCE_S)
        after = state(served)
        names = ("sequence", "published", "failed", "foreign", "incomplete")
        deltas[kind] = {name: by for name in names if (by := getattr(after, name) - getattr(before, name))}
    assert deltas == {
        None: {"sequence": 1, "published": 1},
        "dump_never": {},
        "dump_vanishes": {"sequence": 1, "published": 1},
        "dump_twice": {"sequence": 2, "published": 2},
        "never_sent": {"sequence": 2, "published": 2},
        "sequence_gap": {"sequence": 2, "published": 1},
        "enospc": {"failed": 1},
        "abort": {"incomplete": 1},
    }


async def test_foreign_requests_are_counted(served: Served) -> None:
    """A request whose rid is no marker leaves no file and is counted once, however many chunks it takes."""
    before, names = state(served), served.names()
    url = f"http://127.0.0.1:{served.server.record.port}/generate"
    body = {"rid": "f" * 32, "input_ids": [1] * 300}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200
    assert state(served).foreign == before.foreign + 1
    assert served.names() == names


async def test_a_vanished_dump_and_one_never_sent(served: Served, client: SGLangClient) -> None:
    """The one is counted and not there, the other there under a marker that nobody sent; the true dump is beside it."""
    (vanished, ids), (sent, _) = served.prompt(TOKENS), served.prompt(TOKENS)
    await served.server.fault("dump_vanishes", match=str(vanished))
    await served.server.fault("never_sent", match=str(sent))
    await client.prefill(vanished, ids, PATIENCE_S)
    await client.prefill(sent, ids, PATIENCE_S)
    assert str(vanished) not in served.names()
    other = replace(sent, attempt=sent.attempt + 1000)
    first, second = await served.check(sent, ids), await served.check(other, ids)
    assert second.sequence == first.sequence + 1


async def test_the_second_of_two_dumps_can_wait(served: Served, client: SGLangClient) -> None:
    """With a value the dump comes once more after that many seconds."""
    (marker, ids), before = served.prompt(TOKENS), state(served)
    await served.server.fault("dump_twice", match=str(marker), value=0.2)
    await client.prefill(marker, ids, PATIENCE_S)
    while state(served).published < before.published + 2:  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.01)
    assert (await served.check(marker, ids)).sequence == before.sequence + 2


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


async def test_faults_armed_at_the_start(tmp_path: Path) -> None:
    """`--fault` arms faults before the first request, each start anew; without --allow-faults there is no other way."""
    never = json.dumps({"kind": "dump_never", "count": -1, "match": "-7-"})
    cut = json.dumps({"kind": "http_400"})
    for _ in range(2):
        async with reference_server(tmp_path / "dumps", args=("--fault", never, "--fault", cut)) as server:
            served, client = Served(server, ReferenceModel(tmp_path / "tiny-model"), 128), server.client()
            marker, ids = served.prompt(TOKENS, seed=7)
            with pytest.raises(SampleError) as caught:
                await client.prefill(marker, ids, PATIENCE_S)
            assert caught.value.kind == "request_refused"
            await client.prefill(*served.prompt(TOKENS, seed=7), PATIENCE_S)
            await client.prefill(*(kept := served.prompt(TOKENS)), PATIENCE_S)
            assert served.names() == {str(kept[0])}
            await client.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ('{"kind": "no_such_fault"}', "expected one of"),
        ("not json", "cannot be armed"),
        ("[1]", "cannot be armed"),
        ('{"kind": "die", "counts": 1}', "counts"),
    ],
)
def test_wrong_faults_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, reason: str) -> None:
    """The engine does not start, and says which fault it did not understand."""
    model = tiny_config(tmp_path / "model")
    assert main(["--model-path", str(model), "--fault", fault]) == 1
    said = capsys.readouterr().err
    assert "[usage] fault" in said
    assert reason in said


async def test_a_second_server_with_the_same_record_captures_nothing(tmp_path: Path) -> None:
    """It serves, says in `capture.error` why it does not capture, and leaves the first one's files alone."""
    async with reference_server(tmp_path / "dumps") as server:
        served, client, port = Served(server, ReferenceModel(tmp_path / "tiny-model"), 128), server.client(), free_port()
        await client.prefill(*served.prompt(TOKENS), PATIENCE_S)
        before = state(served)
        command = [sys.executable, "-m", "hsx.testing.reference_engine", "--model-path", str(tmp_path / "tiny-model")]
        environment = {RECORD_VARIABLE: str(server.folder / RECORD_NAME)}
        started = running([*command, "--port", str(port)], tmp_path / "dumps", server.record.epoch, port, environment)
        await asyncio.to_thread(started.__enter__)
        try:
            second, (marker, ids) = SGLangClient("127.0.0.1", port), served.prompt(TOKENS)
            await second.prefill(marker, ids, PATIENCE_S)
            await second.close()
        finally:
            await asyncio.to_thread(started.__exit__, None, None, None)
        refusal = (server.folder / REFUSAL_NAME).read_text()
        assert refusal.startswith(f"pid {server.process.pid} already captures into this epoch")
        assert str(marker) not in served.names()
        assert state(served) == before
        await client.prefill(*served.prompt(TOKENS), PATIENCE_S)
        assert state(served).published == before.published + 1
        await client.close()


async def test_a_lost_folder_is_survived(tmp_path: Path) -> None:
    """As with the plugin: answers go on, dumps are lost, and the state file comes again with a new folder."""
    async with reference_server(tmp_path / "dumps") as server:
        served, client = Served(server, ReferenceModel(tmp_path / "tiny-model"), 128), server.client()
        delete_in_use(server.folder)
        await client.prefill(*served.prompt(TOKENS), PATIENCE_S)
        server.folder.mkdir()
        marker, ids = served.prompt(TOKENS)
        await client.prefill(marker, ids, PATIENCE_S)
        assert served.names() == {str(marker)}
        found = state(served)
        assert (found.pid, found.published, found.incomplete) == (server.process.pid, 1, 1)
        await client.close()


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
    faults.arm("hold", match="-3-")
    faults.arm("hold", match="-4-")
    faults.clear("hold", "-3-")
    assert [faults.armed("hold", rid) for rid in ("-3-", "-4-")] == [False, True]
    assert faults.armed("dump_late", "any")
    faults.clear()
    assert not faults.armed("dump_late", "any")
    assert faults.struck() == {"dump_never": 2, "dump_late": 5}
    for count in (0, -2):
        with pytest.raises(ValueError, match="count"):
            faults.arm("dump_never", count=count)
