"""`hsx import`: an export comes back bit for bit, and what is not sound is listed by reason and left out."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hsx
from hsx.cli import main
from hsx.errors import RunError
from hsx.export import load_format
from hsx.export_run import export
from hsx.exporting import Request, plan
from hsx.importing import import_folder
from hsx.ingest.request import ImportReport, ImportRequest
from hsx.stores.reader import Store
from hsx.testing.exports import LAYERS, LENGTHS, VOCAB, Truth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def assert_same(path: Path, truth: Truth, masks: list[Any] | None = None) -> None:
    """A store has all samples of another one, bit for bit."""
    ours, theirs = hsx.open(path), hsx.open(truth.path)
    assert ours.state_names == theirs.state_names
    assert ours.committed.tolist() == theirs.committed.tolist()
    for row in range(len(LENGTHS)):
        assert np.array_equal(ours[row].hidden_states_numpy, truth.built.states[row])
        assert np.array_equal(ours[row].input_ids_numpy, truth.built.input_ids[row])
        assert np.array_equal(ours[row].loss_mask_numpy, (masks or truth.masks)[row])
        assert np.array_equal(ours[row].hidden_states_numpy, theirs[row].hidden_states_numpy)


def bring(folder: Path, store: Path, kind: str, **how: Any) -> ImportReport:
    roots = {name: store.with_name(f"{store.name}.{name}") for name in ("a", "b")}
    return import_folder(ImportRequest(kind, folder, store, roots, **how))


def test_specforge_comes_back_bit_for_bit(post: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, store = tmp_path / "x", tmp_path / "store"
    assert main(["export", str(post.path), str(folder), "--to", "specforge"]) == 0
    assert main(["import", str(folder), str(store), "--from", "specforge", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.partition("what is what\n")[2])
    assert (report["found"], report["committed"], report["rejected"]) == (5, 5, {})
    assert_same(store, post)
    assert [hsx.open(store).sample_id(row) for row in range(5)] == [f"sample-{row}" for row in range(5)]
    assert main(["verify", "--store", str(store)]) == 0


def test_files_of_others_come_without_a_manifest(post: Truth, tmp_path: Path) -> None:
    """As SpecForge itself writes them, one of them compressed."""
    folder = tmp_path / "x"
    export(plan(Store(post.path), load_format("specforge"), folder, Request()))
    for path in folder.glob("hsx-*"):
        path.unlink()
    plain = folder / "rows_0-2000" / "data_2.ckpt"
    plain.with_suffix(".ckpt.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    report = bring(folder, tmp_path / "store", "specforge", layers=LAYERS)
    assert (report.found, report.committed, report.states) == (5, 5, ("h_2", "h_4", "h_7", "post_norm"))
    assert_same(tmp_path / "store", post)
    assert hsx.open(tmp_path / "store").sample_id(2) == "rows_0-2000/data_2"


def test_files_of_the_connector_come_with_full_masks(pre: Truth, tmp_path: Path) -> None:
    for row, (ids, states) in enumerate(zip(pre.built.input_ids, pre.built.states, strict=True)):
        connector_file(tmp_path / "x" / f"request-{row}.safetensors", ids, states)
    report = bring(tmp_path / "x", tmp_path / "store", "vllm", layers=LAYERS)
    assert (report.committed, report.tokens, report.rejected) == (5, sum(LENGTHS), {})
    assert_same(tmp_path / "store", pre, [np.ones(tokens, np.uint8) for tokens in LENGTHS])


def connector_file(path: Path, ids: Any, states: Any, **more: torch.Tensor) -> None:
    path.parent.mkdir(exist_ok=True)
    tensors = {"token_ids": torch.from_numpy(np.asarray(ids, np.int64)), "hidden_states": bf16(states), **more}
    save_file(tensors, path)


def bf16(bits: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16)


def ruin_torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def ruin_no_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 40)


def ruin_empty(path: Path) -> None:
    path.write_bytes(b"")


def changing(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def ruin(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file({key: value.contiguous() for key, value in tensors.items()}, path)

    return ruin


RUINS: dict[str, tuple[Callable[[Path], None], str]] = {
    "torn": (ruin_torn, "unreadable"),
    "no header": (ruin_no_header, "unreadable"),
    "empty": (ruin_empty, "unreadable"),
    "no states": (changing(lambda t: t.pop("hidden_states")), "missing_key"),
    "no ids": (changing(lambda t: t.pop("token_ids")), "missing_key"),
    "float32": (changing(lambda t: t.update(hidden_states=t["hidden_states"].float())), "bad_type"),
    "fp8": (changing(lambda t: t.update(hidden_states_scales=torch.ones(1))), "fp8"),
    "a layer short": (changing(lambda t: t.update(hidden_states=t["hidden_states"][:, 1:])), "bad_shape"),
    "another width": (changing(lambda t: t.update(hidden_states=t["hidden_states"][..., 1:])), "bad_shape"),
    "a row short": (changing(lambda t: t.update(hidden_states=t["hidden_states"][1:])), "tokens_differ"),
    "no token": (changing(lambda t: t.update(token_ids=t["token_ids"][:0])), "bad_ids"),
    "negative id": (changing(lambda t: t["token_ids"].sub_(VOCAB)), "bad_ids"),
    "a NaN": (changing(lambda t: t["hidden_states"][3, 1, 4].fill_(float("nan"))), "finite"),
    "an infinity": (changing(lambda t: t["hidden_states"][3, 1, 4].fill_(float("inf"))), "finite"),
    "zeroed tail": (changing(lambda t: t["hidden_states"][-2:].zero_()), "nonzero_rows"),
    "stale layer": (changing(lambda t: t["hidden_states"][:, 1].copy_(t["hidden_states"][:, 0])), "not_repeated"),
}


def test_what_is_not_sound_is_listed_and_left_out(pre: Truth, tmp_path: Path) -> None:
    """Every ruin in one folder, behind one sound sample."""
    for row, name in enumerate(["0 sound", *(f"{number + 1} {name}" for number, name in enumerate(RUINS))]):
        connector_file(tmp_path / "x" / f"{row:02d} {name}.safetensors", pre.built.input_ids[1], pre.built.states[1])
    expected: dict[str, int] = {}
    for name, (ruin, reason) in RUINS.items():
        (path,) = (tmp_path / "x").glob(f"* {name}.safetensors")
        ruin(path)
        expected[reason] = expected.get(reason, 0) + 1
    report = bring(tmp_path / "x", tmp_path / "store", "vllm", layers=LAYERS)
    assert report.rejected == expected
    assert (report.found, report.committed) == (len(RUINS) + 1, 1)
    lines = [json.loads(line) for line in report.listing.read_text().splitlines()]
    listed = {line["file"].rpartition("/")[2].split(" ", 2)[2].removesuffix(".safetensors"): line["reason"] for line in lines}
    assert listed == {name: reason for name, (_, reason) in RUINS.items()}
    store = hsx.open(tmp_path / "store")
    assert store.committed.tolist() == [0]
    assert np.array_equal(store[0].hidden_states_numpy, pre.built.states[1])


def test_torn_and_foreign_ckpt_files_are_listed(post: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "x"
    export(plan(Store(post.path), load_format("specforge"), folder, Request()))
    files = [folder / "rows_0-2000" / f"data_{row}.ckpt" for row in range(5)]
    files[0].write_bytes(files[0].read_bytes()[:500])
    raw = torch.load(files[1], weights_only=True)
    torch.save({key: value for key, value in raw.items() if key != "loss_mask"}, files[1])
    torch.save([1, 2], files[2])
    torch.save({**raw, "loss_mask": raw["loss_mask"] + 1}, files[3])
    code = main(["import", str(folder), str(tmp_path / "store"), "--from", "specforge"])
    assert code == 3
    said = capsys.readouterr()
    assert "1 sample of 5 are in" in said.out
    assert "[import_incomplete] 4 samples of 5 cannot be taken" in said.err
    lines = [json.loads(line) for line in (tmp_path / "store.import.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["unreadable", "missing_key", "unreadable", "bad_mask"]
    assert hsx.open(tmp_path / "store")["sample-4"].tokens == LENGTHS[4]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "does not say which layers"),
        ({"layers": (4, 2)}, "expected strictly rising"),
        ({"layers": (2, 4)}, r"nothing to import: 1 bad_shape"),
        ({"layers": LAYERS, "folder": "nowhere"}, "is not there"),
        ({"layers": LAYERS, "store": "x"}, "is there already"),
        ({"layers": LAYERS, "folder": "empty"}, "nothing to import: it has no samples"),
    ],
)
def test_what_cannot_be_imported_is_refused(pre: Truth, tmp_path: Path, how: dict[str, Any], message: str) -> None:
    connector_file(tmp_path / "x" / "a.safetensors", pre.built.input_ids[1], pre.built.states[1])
    (tmp_path / "empty").mkdir()
    how = dict(how)
    folder, store = tmp_path / how.pop("folder", "x"), tmp_path / how.pop("store", "store")
    with pytest.raises(RunError, match=message) as caught:
        bring(folder, store, "vllm", **how)
    assert caught.value.kind == "import_refused"
    assert not (tmp_path / "store").exists()


def test_of_two_samples_with_one_id_the_second_is_not_taken(post: Truth, tmp_path: Path) -> None:
    """SpecForge's folders may have a file twice, plain and compressed."""
    folder = tmp_path / "x"
    export(plan(Store(post.path), load_format("specforge"), folder, Request()))
    plain = folder / "rows_0-2000" / "data_2.ckpt"
    plain.with_suffix(".ckpt.gz").write_bytes(gzip.compress(plain.read_bytes()))
    for path in folder.glob("hsx-*"):
        path.unlink()
    report = bring(folder, tmp_path / "store", "specforge", layers=LAYERS)
    assert (report.found, report.committed, report.rejected) == (6, 5, {"duplicate_id": 1})
    assert_same(tmp_path / "store", post)


def test_an_export_to_another_trainer_is_refused(post: Truth, tmp_path: Path) -> None:
    export(plan(Store(post.path), load_format("eagle"), tmp_path / "x", Request()))
    with pytest.raises(RunError, match="is an export to eagle") as caught:
        bring(tmp_path / "x", tmp_path / "store", "specforge")
    assert caught.value.kind == "import_refused"
