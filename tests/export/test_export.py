"""`hsx export`: what every format has in common, selection, continuing, links, and what is refused."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hsx.cli import main
from hsx.errors import RunError
from hsx.export import FORMATS, load_format
from hsx.export.files import CheckedFile, whole_file
from hsx.export.manifest import INDEX, RowList, WrittenRow, read_manifest, read_rows
from hsx.export.protocol import Exported
from hsx.export_run import Progress, export
from hsx.exporting import Request, plan
from hsx.stores.reader import Store
from hsx.testing.exports import LENGTHS, WIDTH, Truth, exportable_store

PER_SAMPLE = [name for name in FORMATS if name != "speculators"]
"""What can be written without pyarrow; the other one is tested where the trainers are."""


def write(truth: Truth, folder: Path, to: str, **how: Any) -> Progress:
    return export(plan(Store(truth.path), load_format(to), folder, Request(**how)))


def files(folder: Path) -> list[str]:
    return sorted(row.file for path in folder.glob("hsx-rows*.jsonl") for row in read_rows(path))


def tensors(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        return dict(load_file(path))
    return dict(torch.load(path, weights_only=True, mmap=True))


@pytest.mark.parametrize("to", PER_SAMPLE)
def test_every_format_keeps_the_contract(pre: Truth, tmp_path: Path, to: str) -> None:
    form = load_format(to)
    done = write(pre, tmp_path, to)
    assert (done.done, done.rows, done.kept, done.linked) == (len(LENGTHS), len(LENGTHS), 0, 0)
    rows = list(read_rows(tmp_path / "hsx-rows.jsonl"))
    assert sorted(row.row for row in rows) == list(range(len(LENGTHS)))
    assert np.load(tmp_path / INDEX).tolist() == list(range(len(LENGTHS)))
    for row in rows:
        path = tmp_path / row.file
        assert (row.id, row.index, row.tokens) == (f"sample-{row.row}", row.row, LENGTHS[row.row])
        assert row.file == form.path(row.row, 0)
        assert path.stat().st_size == row.bytes
        assert google_crc32c.value(path.read_bytes()) == row.crc32c
        found = tensors(path)
        assert found.keys() == form.keys.keys()
        sizes = {"S": row.tokens, "H": WIDTH, "3H": 3 * WIDTH, "K*H": 3 * WIDTH, "K+1": 4, "1": 1}
        for key, says in form.keys.items():
            value = found[key]
            if "[" not in says:
                assert type(value).__name__ == says
                continue
            kind, shape = says.removesuffix("]").split(" [")
            assert (str(value.dtype), list(value.shape)) == (f"torch.{kind}", [sizes[part] for part in shape.split(", ")]), key
            assert value.untyped_storage().nbytes() >= value.numel() * value.element_size()
        assert np.array_equal(found["input_ids"].reshape(-1).numpy(), pre.built.input_ids[row.row])
        assert np.array_equal(found["loss_mask"].reshape(-1).numpy(), pre.masks[row.row])
    assert not list(tmp_path.rglob("*.partial"))
    manifest = read_manifest(tmp_path)
    assert (manifest["to"], manifest["rows"], manifest["tokens"]) == (to, len(LENGTHS), sum(LENGTHS))
    assert [slot["state"] for slot in manifest["mapping"]["slots"]] == manifest["mapping"]["states"]


@pytest.mark.parametrize("to", PER_SAMPLE)
def test_files_are_no_larger_than_what_is_in_them(pre: Truth, tmp_path: Path, to: str) -> None:
    """torch.save of a view would take along all that it views."""
    write(pre, tmp_path, to)
    for row in read_rows(tmp_path / "hsx-rows.jsonl"):
        payload = sum(
            v.numel() * v.element_size() for v in tensors(tmp_path / row.file).values() if isinstance(v, torch.Tensor)
        )
        assert payload <= row.bytes < payload + 8192


def test_plain_files_hold_the_bits_of_the_store(pre: Truth, tmp_path: Path) -> None:
    write(pre, tmp_path, "safetensors")
    for row in read_rows(tmp_path / "hsx-rows.jsonl"):
        with safe_open(tmp_path / row.file, framework="pt") as file:
            assert file.metadata() == {"id": row.id, "states": '["h_2", "h_4", "h_7", "pre_norm"]'}
            found = file.get_tensor("hidden_states").view(torch.uint16).numpy()
        assert np.array_equal(found, pre.built.states[row.row])


def test_layers_are_taken_in_the_order_asked_for(pre: Truth, tmp_path: Path) -> None:
    write(pre, tmp_path, "safetensors", layers=(7, 2))
    found = load_file(tmp_path / "rows_0-2000" / "sample_3.safetensors")["hidden_states"].view(torch.uint16).numpy()
    assert np.array_equal(found, pre.built.states[3][:, [2, 0, 3]])


def test_the_mapping_is_said_in_the_trainers_words(pre: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(pre.path), str(tmp_path / "x"), "--to", "specforge", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "aux_hidden_state[..., 1H:2H] = h_4 (the output of layer 3 in the trainer's count)" in said
    assert "hidden_state = post_norm, computed from pre_norm with the recorded final norm" in said
    assert "[1, 3, 6]" in said
    assert not (tmp_path / "x").exists()
    assert main(["export", str(pre.path), str(tmp_path / "x"), "--to", "modelopt", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["mapping"]["final"], document["mapping"]["final_computed"]) == ("pre_norm", False)
    assert document["part"]["done"] == len(LENGTHS)


def test_selection_counts_what_it_leaves_out(pre: Truth, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.write_text("sample-3\nsample-0\nsample-4\n")
    folder = tmp_path / "x"
    command = ["export", str(pre.path), str(folder), "--to", "safetensors", "--ids", str(ids), "--max-tokens", "64"]
    assert main(command) == 0
    assert [row.index for row in read_rows(folder / "hsx-rows.jsonl")] == [0, 4]
    assert read_manifest(folder)["left_out"] == {"not_in_ids": 2, "longer_than_max_tokens": 1}


def test_what_is_left_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each sample for one reason, the first ids on the screen and all of them in the document."""
    truth = exportable_store(tmp_path / "store", "pre_norm", lengths=(5,) * 8 + (64, 65, 2, 1), committed=10)
    ids = tmp_path / "ids"
    ids.write_text("sample-0\nsample-8\nsample-9\n")
    command = ["export", str(truth.path), str(tmp_path / "x"), "--to", "safetensors", "--ids", str(ids), "--max-tokens", "64"]
    assert main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "left out" in line] == [
        "  left out: 2 samples (not_committed): 'sample-10', 'sample-11'",
        "  left out: 7 samples (not_in_ids): 'sample-1', 'sample-2', 'sample-3', 'sample-4', 'sample-5' and 2 more, see --json",
        "  left out: 1 sample (longer_than_max_tokens): 'sample-9'",
    ]
    for dry in (["--dry-run"], []):
        assert main([*command, "--json", *dry]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["left_out"] == {"not_committed": 2, "not_in_ids": 7, "longer_than_max_tokens": 1}
        left = document["left_out_samples"]
        assert {entry["index"] for entry in left} == set(range(12)) - {0, 8}
        assert left[-1] == {"id": "sample-9", "index": 9, "reason": "longer_than_max_tokens"}
        assert document["rows"] + len(left) == 12
    assert "left_out_samples" not in read_manifest(tmp_path / "x")  # a million ids are no matter of a manifest


def test_samples_that_are_not_committed_are_no_rows(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "pre_norm", committed=3)
    write(truth, tmp_path / "x", "safetensors")
    assert read_manifest(tmp_path / "x")["left_out"] == {"not_committed": 2}
    with pytest.raises(RunError, match=r"'sample-4' .* is not committed") as caught:
        write(truth, tmp_path / "y", "safetensors", ids=["sample-4"])
    assert caught.value.kind == "sample_unknown"


def test_parts_make_up_one_export(pre: Truth, tmp_path: Path) -> None:
    write(pre, tmp_path / "one", "specforge")
    for part in range(3):
        write(pre, tmp_path / "parts", "specforge", part=part, parts=3)
    assert files(tmp_path / "parts") == files(tmp_path / "one")
    for name in files(tmp_path / "one"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_an_export_is_continued(pre: Truth, tmp_path: Path) -> None:
    write(pre, tmp_path, "specforge")
    lines = (tmp_path / "hsx-rows.jsonl").read_bytes().splitlines(keepends=True)
    first, second, third = (json.loads(line)["file"] for line in lines[:3])
    untouched = (tmp_path / third).stat().st_mtime_ns
    (tmp_path / first).unlink()
    os.truncate(tmp_path / second, 100)
    (tmp_path / "hsx-rows.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:20])  # as a kill leaves it
    done = write(pre, tmp_path, "specforge")
    assert (done.done, done.kept) == (5, 2)
    assert (tmp_path / third).stat().st_mtime_ns == untouched
    again = write(pre, tmp_path, "specforge")
    assert (again.done, again.kept, again.nbytes) == (5, 5, 0)
    assert {row.row: row.file for row in read_rows(tmp_path / "hsx-rows.jsonl")}.keys() == set(range(5))


def test_a_folder_with_something_else_is_refused(pre: Truth, tmp_path: Path) -> None:
    write(pre, tmp_path / "x", "specforge")
    for to, how in (("modelopt", {}), ("specforge", {"max_tokens": 64}), ("specforge", {"draft_vocab": 9, "vocab_size": 300})):
        with pytest.raises(RunError, match="holds another export") as caught:
            write(pre, tmp_path / "x", to, **how)
        assert caught.value.kind == "export_refused"
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "mine").touch()
    with pytest.raises(RunError, match=r"has mine and no hsx-export\.json"):
        write(pre, tmp_path / "y", "specforge")


def test_two_at_once_write_each_file_once(pre: Truth, tmp_path: Path) -> None:
    """The second of two processes on one part is refused; here two threads, whose locks are as much in each other's way."""
    inside, go = threading.Event(), threading.Event()

    def hold(_: Progress) -> None:
        inside.set()
        assert go.wait(300)

    planned = plan(Store(pre.path), load_format("specforge"), tmp_path, Request())
    other = threading.Thread(target=export, args=(planned, hold))
    other.start()
    try:
        assert inside.wait(300)
        with pytest.raises(RunError) as caught:
            export(planned)
        assert caught.value.kind == "job_locked"
    finally:
        go.set()
        other.join(300)
    assert len(files(tmp_path)) == len(LENGTHS)


def test_equal_files_are_links_where_asked_for(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "pre_norm", lengths=(40, 40, 40, 9), twins={1: 0, 2: 0})
    done = write(truth, tmp_path / "y", "eagle", link=True)
    assert (done.done, done.linked) == (4, 2)
    inodes = [(tmp_path / "y" / "samples" / "rows_0-2000" / f"data_{row}.ckpt").stat().st_ino for row in range(4)]
    assert (len(set(inodes[:3])), len(set(inodes))) == (1, 2)
    assert write(truth, tmp_path / "y", "eagle", link=True).kept == 4


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("speculators", {}, "pyarrow|cannot be undone"),
    ("specforge", {"layers": (2, 4)}, "takes 3 layers, and 2 are chosen"),
    ("specforge", {"layers": (2, 4, 5)}, "has no h_5; expected --layers out of 2, 4, 7"),
    ("specforge", {"layers": (2, 4, 4)}, "expected each layer once"),
    ("modelopt", {"draft_vocab": 10}, "no file for the draft's vocabulary"),
    ("modelopt", {"index_only": True}, "nothing but its samples"),
    ("modelopt", {"link": True}, "hold the sample's id"),
    ("specforge", {"draft_vocab": 10}, "expected --vocab-size"),
    ("specforge", {"draft_vocab": 400, "vocab_size": 300}, "expected 1 up to the model's vocabulary"),
    ("specforge", {"max_tokens": 1}, "no sample to export: 5 longer_than_max_tokens"),
]


@pytest.mark.parametrize(("to", "how", "message"), REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_written(
    post: Truth, tmp_path: Path, to: str, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=message) as caught:
        write(post, tmp_path / "x", to, **how)
    assert caught.value.kind in ("export_refused", "dependency_missing")
    assert not (tmp_path / "x").exists()


def test_post_norm_needs_the_norm(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "pre_norm", norm=False)
    with pytest.raises(RunError, match="without the model's final norm") as caught:
        write(truth, tmp_path / "x", "eagle")
    assert caught.value.kind == "export_refused"
    write(truth, tmp_path / "x", "modelopt")


def test_a_token_beyond_the_vocabulary_is_told(post: Truth, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"token id .* occurs; expected less than --vocab-size 20") as caught:
        write(post, tmp_path / "x", "specforge", draft_vocab=10, vocab_size=20)
    assert caught.value.kind == "export_refused"


def test_a_list_of_ids_that_cannot_be_read_is_told(post: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(post.path), str(tmp_path / "x"), "--to", "specforge", "--ids", "/nowhere/ids"]) == 2
    assert "[usage] --ids /nowhere/ids cannot be read" in capsys.readouterr().err


def test_a_damaged_sample_stops_the_export_and_leaves_the_rest(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "post_norm")
    shard = truth.built.shard(3)
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RunError) as caught:
        write(truth, tmp_path / "x", "specforge", threads=1)
    assert caught.value.kind == "store_invalid"
    assert [row.row for row in read_rows(tmp_path / "x" / "hsx-rows.jsonl")] == [0, 1, 2]


def test_a_full_disk_ends_a_file_of_either_kind() -> None:
    """Through torch's writer as well, which calls ours from C++."""
    for form in (load_format("specforge"), load_format("safetensors")):
        states = torch.zeros(9, 4, WIDTH, dtype=torch.bfloat16)
        sample = Exported(0, "a", torch.arange(9), torch.ones(9, dtype=torch.int64), states, ("h_2", "h_4", "h_7", "post_norm"))
        with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            form.write(CheckedFile(file), sample)


def test_a_folder_that_cannot_be_is_an_error_of_its_own(pre: Truth, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file")
    with pytest.raises(RunError, match="cannot be written") as caught:
        write(pre, tmp_path / "x", "specforge")
    assert caught.value.kind == "export_unwritable"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def half() -> None:
        with whole_file(tmp_path / "a") as file:
            file.write(b"half")
            raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        half()
    assert list(tmp_path.iterdir()) == []


def test_a_torn_line_is_passed_over_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    row = WrittenRow(0, "a", 0, 1, "f", 1, 1)
    with RowList(path) as rows:
        rows.add(row)
    path.write_bytes(path.read_bytes() + b'{"row": 1, ')
    assert list(read_rows(path)) == [row]
    with RowList(path) as rows:
        rows.add(row)
    assert list(read_rows(path)) == [row, row]
    path.write_bytes(path.read_bytes() + b'{"row": 1}\n')
    with pytest.raises(RunError, match="line 3 is no row") as caught:
        list(read_rows(path))
    assert caught.value.kind == "export_refused"


def test_samples_that_dflash_raises_on_are_left_out(tmp_path: Path) -> None:
    """Of one token, none has a neighbour that counts."""
    truth = exportable_store(tmp_path / "store", "pre_norm", lengths=(1, 64, 2))
    write(truth, tmp_path / "x", "specforge-dflash")
    assert np.load(tmp_path / "x" / INDEX).tolist() == [1]
    assert read_manifest(tmp_path / "x")["left_out"] == {"no_two_masked_neighbours": 2}
