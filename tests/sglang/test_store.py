"""The real SGLang under the whole of hsx: what lies in the store is what Hugging Face computes, whoever reads it.

A tiny Llama, 64 prompts of 1 to 1500 tokens, 16 at once in chunks of 128, two roots, `hsx run` as a user calls it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore
import zarr

import hsx
from hsx.config_load import LoadedConfig, load
from hsx.exit_codes import ExitCode
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.capture_server import CPU_ARGUMENTS, CPU_VARIABLES, START_S
from hsx.testing.commands import command_lines, hsx_done
from hsx.testing.jobs import write_job
from hsx.testing.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hsx.stores.reader import Store
    from hsx.testing.tiny_models import Kind

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]

LAYERS = (1, 4, 7)
SAMPLES, LONGEST = 64, 1500
STORED = 2.0**-8
"""Relative error of a row that rounding to bf16 may leave."""
PATIENCE_S = 1500.0


@dataclass(frozen=True)
class Extracted:
    """A finished job: where it lies, its model, its prompts by index, and what `hsx run --json` said."""

    loaded: LoadedConfig
    model: Path
    prompts: list[list[int]]
    outcome: dict[str, Any]

    def store(self) -> Store:
        return hsx.open(self.loaded.store)


@pytest.fixture(scope="module")
def extracted(
    sglang_python: Path, tiny_model: Callable[[Kind], Path], samples: Any, tmp_path_factory: pytest.TempPathFactory
) -> Extracted:
    """The job, run once for all tests; the dump directory is an ordinary folder, which hsx warns of and takes."""
    folder, model = tmp_path_factory.mktemp("job"), tiny_model("llama")
    prompts = [ids.tolist() for ids in samples(SAMPLES, LONGEST, 1000, 10).values()]
    roots = [{"name": name, "path": f"root-{name}", "reserve": "0B"} for name in ("a", "b")]
    engine = {
        "kind": "sglang",
        "ownership": "spawn",
        "port": free_port(),
        "python": str(sglang_python),
        "args": list(CPU_ARGUMENTS),
        "env": dict(CPU_VARIABLES),
        "start_timeout_s": START_S,
    }
    sections: dict[str, Any] = {
        "model": {"path": str(model)},
        "capture": {"layers": list(LAYERS)},
        "engine": engine,
        "pipeline": {"concurrency": 16, "dump_deadline_s": 120.0},
        # Patience with a busy machine: a verdict on a slow server is none of this test's.
        "watchdog": {"grace_s": 300.0, "slowest_tokens_per_s": 5.0},
        "status": {"port": 0},
        "roots": roots,
    }
    job = write_job(folder, sections)
    (folder / "dumps").mkdir()
    rows = [{"id": f"s{i}", "input_ids": ids, "loss_mask": [i % 2] * len(ids)} for i, ids in enumerate(prompts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = hsx_done(job, "run", "--json", patience_s=PATIENCE_S)
    server_log = folder / "store.zarr.job" / "server.log"
    tail = server_log.read_text(errors="replace")[-3000:] if server_log.exists() else "no server log"
    assert done.process.returncode == ExitCode.DONE, f"{done.log.read_text()[-4000:]}\n{tail}"
    return Extracted(load(job), model, prompts, json.loads(done.out.read_text()))


def test_every_sample_is_committed_at_its_first_attempt(extracted: Extracted) -> None:
    outcome = extracted.outcome
    assert (outcome["committed"], outcome["pending"], outcome["quarantined"], outcome["rejected"]) == (SAMPLES, 0, 0, 0)
    assert (outcome["violations"], outcome["restarts"]) == ({}, 0)
    assert outcome["tokens"] == sum(map(len, extracted.prompts))
    assert {len(ids) for ids in extracted.prompts} >= {1, LONGEST}
    with LedgerReader(extracted.loaded.state_dir / FILE_NAME) as ledger:
        rows = list(ledger.committed())
        assert [ledger.sample(row.index).attempts for row in rows] == [1] * SAMPLES
        assert ledger.failures_by_reason() == {}
    assert {row.root for row in rows} == {"a", "b"}
    assert len({row.sequence for row in rows}) == SAMPLES


def test_no_dump_and_no_server_is_left(extracted: Extracted) -> None:
    assert [path for path in extracted.loaded.dump_dir.rglob("hsx1-*") if path.is_file()] == []
    assert [line for line in command_lines() if str(extracted.loaded.path) in line] == []


def test_the_store_is_what_hugging_face_computes(
    extracted: Extracted, judge: Callable[[Path, Sequence[int], str], Any]
) -> None:
    store = extracted.store()
    assert store.state_names == ("h_1", "h_4", "h_7", "post_norm")
    assert store.committed.tolist() == list(range(SAMPLES))
    looked = judge(extracted.model, LAYERS, "post_norm")
    for index, ids in enumerate(extracted.prompts):
        sample = store[index]
        assert sample.id == f"s{index}"
        assert sample.input_ids.tolist() == ids
        assert sample.loss_mask.tolist() == [index % 2] * len(ids)
        bits = sample.hidden_states_numpy
        looked.look(np.array(ids, np.int32), (bits.astype(np.uint32) << 16).view(np.float32), bits)
    assert looked.worst_stored <= STORED
    # An off-by-one in the layers would miss by more than ten times as much.
    assert looked.nearest > 10 * STORED


def test_zarr_and_tensorstore_read_what_hsx_reads(extracted: Extracted) -> None:
    store = extracted.store()
    array = zarr.open_group(extracted.loaded.store, mode="r")["hidden_states"]
    assert isinstance(array, zarr.Array)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(extracted.loaded.store / "hidden_states")}}
    theirs = tensorstore.open(spec, read=True).result()
    assert theirs.shape == tuple(array.shape) == (SAMPLES, LONGEST, len(LAYERS) + 1, 256)
    for index, ids in enumerate(extracted.prompts):
        bits = store[index].hidden_states_numpy
        assert bits.shape == (len(ids), len(LAYERS) + 1, 256)
        assert np.array_equal(np.asarray(array[index, : len(ids)]), bits)
        assert np.array_equal(theirs[index, : len(ids)].read().result().view(np.uint16), bits)


def test_verify_proves_it_against_hugging_face(extracted: Extracted) -> None:
    done = hsx_done(
        extracted.loaded.path,
        *("verify", "--against-hf", str(extracted.model), "--hf-samples", str(SAMPLES), "--json"),
        patience_s=PATIENCE_S,
    )
    assert done.process.returncode == ExitCode.DONE, done.out.read_text()[-4000:]
    report = json.loads(done.out.read_text())
    assert (report["committed"], report["read"], report["damage"]) == (SAMPLES, SAMPLES, [])
    assert report["against_hf"]["ok"]
    assert len(report["against_hf"]["samples"]) == SAMPLES
    assert report["against_hf"]["worst"] <= STORED


def test_the_final_norm_is_the_models(extracted: Extracted) -> None:
    from safetensors import safe_open

    found = extracted.store().final_norm
    assert found is not None
    with safe_open(extracted.model / "model.safetensors", "np") as file:
        assert np.array_equal(found[0], file.get_tensor("model.norm.weight"))
