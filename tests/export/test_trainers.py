"""Exports as the trainers' own loaders see them: speculators 0.9.0, SpecForge 0.2.0, ModelOpt 0.47.0."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import hsx
from hsx.testing.exports import EPS, LENGTHS, VOCAB, WIDTH, Truth
from hsx.testing.sglang_job import interpreter
from hsx.testing.trainers import trainers_python

if TYPE_CHECKING:
    from numpy.typing import NDArray

DRAFT = 60
MAX_LEN = 96
STEPS = 20
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def read(pre: Truth, post: Truth, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program found; run once, for the trainers take long to import."""
    out = tmp_path_factory.mktemp("read")
    program = Path(__file__).with_name("trainers_program.py")
    arguments = [str(trainers_python()), "-W", "ignore", str(program), str(pre.path), str(post.path), str(out)]
    # SpecForge's loss is a kernel of Triton's, which interprets it on the CPU; of SGLang's environment nothing else is wanted.
    (triton,) = interpreter().parents[1].glob("lib/python3*/site-packages/triton")
    (out / "borrowed").mkdir()
    (out / "borrowed" / "triton").symlink_to(triton)
    paths = [str(out / "borrowed"), *filter(None, [os.environ.get("PYTHONPATH")])]
    how = {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=800, cwd=out, env={**os.environ, **how})
    assert done.returncode == 0, done.stderr[-4000:]
    assert (out / "done.json").exists()
    return out


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def bits(tensor: torch.Tensor) -> NDArray[np.uint16]:
    assert tensor.dtype == torch.bfloat16
    return tensor.contiguous().view(torch.uint16).numpy()


def normed(truth: Truth, row: int) -> NDArray[np.uint16]:
    """post_norm of a sample, reckoned in float64 and rounded to bf16."""
    x = (truth.built.states[row][:, -1].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * truth.weight
    return bits(torch.from_numpy(y).to(torch.bfloat16))


def assert_close_bits(found: NDArray[np.uint16], expected: NDArray[np.uint16]) -> None:
    """Equal but for a last bit here and there, where float32 and float64 fall on two sides of a tie."""
    off = np.abs(found.astype(np.int32) - expected.astype(np.int32))
    assert off.max() <= 1
    assert (off > 0).mean() < 0.01


def flat(truth: Truth, row: int) -> NDArray[np.uint16]:
    return truth.built.states[row][:, :-1].reshape(LENGTHS[row], -1)


def test_specforge_reads_eagle3(read: Path, pre: Truth, post: Truth) -> None:
    for name, truth in (("specforge", pre), ("specforge-post", post)):
        found = load(read / f"{name}.pt")
        assert len(found["raw"]) == len(LENGTHS)
        assert found["paths"][3].endswith("/rows_0-2000/data_3.ckpt")
        for row, (raw, specs) in enumerate(zip(found["raw"], found["specs"], strict=True)):
            tokens = LENGTHS[row]
            assert specs["aux_hidden_state"][0] == [1, tokens, 3 * WIDTH]
            assert specs["hidden_state"][0] == [1, tokens, WIDTH]
            assert {key: value.dtype for key, value in raw.items()} == {
                "input_ids": torch.int64,
                "loss_mask": torch.int64,
                "aux_hidden_state": torch.bfloat16,
                "hidden_state": torch.bfloat16,
            }
            assert np.array_equal(raw["input_ids"].numpy(), truth.built.input_ids[row])
            assert np.array_equal(raw["loss_mask"].numpy(), truth.masks[row])
            assert np.array_equal(bits(raw["aux_hidden_state"][0]), flat(truth, row))
            if truth is post:
                assert np.array_equal(bits(raw["hidden_state"][0]), truth.built.states[row][:, -1])
            else:
                assert_close_bits(bits(raw["hidden_state"][0]), normed(truth, row))


def test_specforge_batches_are_the_same_without_an_export(read: Path) -> None:
    found = load(read / "specforge-batches.pt")
    assert found["loader"]["hidden_state"].shape == (len(LENGTHS), MAX_LEN, 3 * WIDTH)
    for other in ("older", "direct"):
        assert found[other].keys() == found["loader"].keys()
        for key, value in found["loader"].items():
            same = value is None if found[other][key] is None else torch.equal(value, found[other][key])
            assert same, (other, key)


def test_specforge_vocabulary(read: Path, pre: Truth) -> None:
    found = load(read / "specforge-batches.pt")
    written = torch.load(read / "specforge" / "vocab_mapping" / "vocab_mapping.pt", weights_only=True)
    chosen = (written["d2t"] + torch.arange(DRAFT)).tolist()
    assert torch.equal(torch.nonzero(written["t2d"])[:, 0], torch.tensor(chosen))
    assert (len(written["t2d"]), written["t2d"].dtype, written["d2t"].dtype) == (VOCAB, torch.bool, torch.int64)
    theirs = (found["d2t"] + torch.arange(DRAFT)).tolist()
    count = found["counts"]
    # Which of equally frequent tokens are taken is SpecForge's order of meeting them; how often they occur is not.
    assert sorted(count.get(token, 0) for token in chosen) == sorted(count.get(token, 0) for token in theirs)
    assert count == {
        int(token): int(number)
        for token, number in zip(
            *np.unique(
                np.concatenate([ids[mask == 1] for ids, mask in zip(pre.built.input_ids, pre.masks, strict=True)]),
                return_counts=True,
            ),
            strict=True,
        )
    }


def test_specforge_reads_dflash_and_dspark(read: Path, pre: Truth) -> None:
    found = load(read / "dflash.pt")
    for name in ("dflash", "dspark"):
        batch = found[name]
        assert batch["hidden_states"].shape == (len(LENGTHS), MAX_LEN, 3 * WIDTH)
        for row, tokens in enumerate(LENGTHS):
            kept = min(tokens, MAX_LEN)
            assert np.array_equal(bits(batch["hidden_states"][row, :kept]), flat(pre, row)[:kept])
            assert np.array_equal(batch["input_ids"][row, :kept].numpy(), pre.built.input_ids[row][:kept])
            assert np.array_equal(batch["loss_mask"][row, :kept].numpy(), pre.masks[row][:kept])
    for row, tokens in enumerate(LENGTHS):
        kept = min(tokens, MAX_LEN)
        assert_close_bits(bits(found["dspark"]["target_last_hidden_states"][row, :kept]), normed(pre, row)[:kept])


def test_modelopt_reads_both_kinds_of_final_state(read: Path, pre: Truth, post: Truth) -> None:
    found = load(read / "modelopt.pt")
    for name, truth in (("pre_norm", pre), ("post_norm", post)):
        assert found[name]["ids"] == [f"sample-{row}" for row in range(len(LENGTHS))]
        assert found[name]["batch"]["base_model_outputs"]["base_hidden_prenorm"] is (name == "pre_norm")
        for row, item in enumerate(found[name]["items"]):
            assert np.array_equal(bits(item["base_model_hidden_states"]), truth.built.states[row][:, -1])
            assert np.array_equal(bits(item["aux_hidden_states"]), flat(truth, row))
            assert np.array_equal(item["input_ids"].numpy(), truth.built.input_ids[row])
            assert np.array_equal(item["loss_mask"].numpy(), truth.masks[row])
            assert item["base_hidden_prenorm"] is (name == "pre_norm")


def test_angelslim_reads_its_files_and_pads_them(read: Path, pre: Truth) -> None:
    found = load(read / "angelslim.pt")
    assert found["files"] == [f"rank_0/rows_0-2000/data_{row}.ckpt" for row in range(len(LENGTHS))]
    assert found["batch"]["hidden_states"].shape == (len(LENGTHS), max(LENGTHS), 3 * WIDTH)
    for row, (item, tokens) in enumerate(zip(found["items"], LENGTHS, strict=True)):
        assert item["input_ids"].tolist() == [pre.built.input_ids[row].tolist()]
        for name, value in found["batch"].items():
            assert torch.equal(value[row, :tokens], item[name][0]), name
            assert not value[row, tokens:].any(), name
        assert np.array_equal(found["batch"]["loss_mask"][row, :tokens].numpy(), pre.masks[row])
        assert np.array_equal(bits(found["batch"]["hidden_states"][row, :tokens]), flat(pre, row))
        assert_close_bits(bits(found["batch"]["target_hiddens"][row, :tokens]), normed(pre, row))


def test_speculators_reads_the_export_and_the_store(read: Path, pre: Truth) -> None:
    found = load(read / "speculators.pt")
    assert (found["rows"], found["corrupt"], found["beyond"]) == (len(LENGTHS), {}, None)
    assert found["lengths"] == list(LENGTHS)
    assert "hsx" in found["backends"]
    for row in range(len(LENGTHS)):
        assert np.array_equal(bits(found["files"][row]["hidden_states"]), pre.built.states[row])
        ours, theirs = found["direct"][row], found["exported"][row]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
        assert np.array_equal(bits(theirs["hidden_states"]), flat(pre, row))
        assert np.array_equal(bits(theirs["verifier_last_hidden_states"]), pre.built.states[row][:, -1])
        assert np.array_equal(theirs["input_ids"].numpy(), pre.built.input_ids[row])
        assert np.array_equal(theirs["loss_mask"].numpy(), pre.masks[row])


def test_speculators_vocabulary(read: Path) -> None:
    found = load(read / "speculators.pt")
    for key in ("d2t", "t2d"):
        assert np.array_equal(found["written"][key], found[key].numpy())


def test_speculators_folders_come_back_bit_for_bit(read: Path, pre: Truth) -> None:
    for name, missing, ids in (("imported", set(), "sample-{}"), ("imported-theirs", {1}, "hidden_states/hs_{}")):
        store = hsx.open(read / name)
        assert store.state_names == ("h_2", "h_4", "h_7", "pre_norm")
        wanted = [row for row in range(len(LENGTHS)) if row not in missing]
        assert store.committed.tolist() == list(range(len(wanted)))
        for row in wanted:
            sample = store[ids.format(row)]
            assert np.array_equal(sample.hidden_states_numpy, pre.built.states[row])
            assert np.array_equal(sample.input_ids_numpy, pre.built.input_ids[row])
            assert np.array_equal(sample.loss_mask_numpy, pre.masks[row])
    (line,) = (read / "imported-theirs.import.jsonl").read_text().splitlines()
    assert (json.loads(line)["row"], json.loads(line)["reason"]) == (1, "tokens_differ")


def test_speculators_trains_alike_from_both_and_its_loss_falls(read: Path) -> None:
    """Its loaders, model, loss, optimizer and loop; a step on the training samples and a validation an epoch."""
    trained = load(read / "speculators.pt")["trained"]
    assert trained["exported"] == trained["direct"]
    assert_falls(trained["direct"]["losses"])
    assert len(trained["direct"]["fed"]) == 2 * STEPS
    assert {"0", str(STEPS - 1), "checkpoint_best"} <= set(trained["direct"]["written"])


def test_specforge_trains_alike_from_both_and_its_loss_falls(read: Path) -> None:
    """Its reader and collator, model, loss, optimizer and loop."""
    trained = load(read / "specforge-trained.pt")
    assert trained["exported"] == trained["direct"]
    assert_falls(trained["direct"]["losses"])
    assert len(trained["direct"]["fed"]) == STEPS


def assert_falls(losses: list[float]) -> None:
    """A loss that is lower after each few steps than before them."""
    assert len(losses) == STEPS
    means = [float(np.mean(losses[at : at + 5])) for at in range(0, STEPS, 5)]
    assert all(later < earlier for earlier, later in pairwise(means)), losses
    assert losses[-1] < 0.9 * losses[0], losses
