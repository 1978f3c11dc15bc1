"""`hsx export` where it is easily wrong without anybody noticing: order of layers, what a trainer lists, what changed since."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hsx
from hsx.cli import main
from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.errors import RunError
from hsx.export import FORMATS, load_format
from hsx.export.files import whole_file
from hsx.export.manifest import read_manifest, read_rows
from hsx.export.mapping import map_states
from hsx.export.vocabulary import coverage
from hsx.export_run import export
from hsx.exporting import Request, plan
from hsx.stores.group import open_store
from hsx.stores.reader import Store
from hsx.stores.seal import SealedArrays, write_seal
from hsx.testing.exports import LENGTHS, WIDTH, Truth, exportable_store
from hsx.testing.stores import RUN, build_store, payload, random_states

if TYPE_CHECKING:
    from hsx.export_run import Progress


def write(truth: Truth, folder: Path, to: str, **how: Any) -> Progress:
    return export(plan(Store(truth.path), load_format(to), folder, Request(**how)))


def load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True))


def bits(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint16).numpy()


def refused(truth: Truth, folder: Path, to: str, message: str, **how: Any) -> None:
    with pytest.raises(RunError, match=message) as caught:
        write(truth, folder, to, **how)
    assert caught.value.kind == "export_refused"


def test_the_folder_of_eagles_trainer_has_samples_alone(pre: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """EAGLE's trainer walks the folder and loads every file in it."""
    assert main(["export", str(pre.path), str(tmp_path / "x"), "--to", "eagle"]) == 0
    assert f"the trainer is given {tmp_path / 'x' / 'samples'}" in capsys.readouterr().out
    assert read_manifest(tmp_path / "x")["trainer_folder"] == "samples"
    found = [Path(root, name) for root, _, names in os.walk(tmp_path / "x" / "samples") for name in names]
    assert len(found) == len(LENGTHS)
    assert sorted(len(load(path)["hidden_state"]) for path in found) == sorted(LENGTHS)


@pytest.mark.parametrize("to", [name for name in FORMATS if name not in ("eagle", "safetensors")])
def test_layers_go_to_a_draft_in_the_order_in_which_servers_hand_them_out(to: str) -> None:
    """Servers collect layers as they compute them: a draft trained on another order would be fed the wrong ones."""
    spec = CaptureSpec((0, 2, 4, 7), "pre_norm")
    with pytest.raises(RunError, match=r"--layers is 7,2,4; expected 2,4,7: servers hand"):
        map_states(load_format(to), spec, (7, 2, 4), has_norm=True)
    mapping = map_states(load_format(to), spec, (0, 2, 7), has_norm=True)
    assert mapping.stored == ("h_0", "h_2", "h_7", "pre_norm")
    shift = 0 if to == "speculators" else 1
    assert mapping.trainer_layers == [-shift, 2 - shift, 7 - shift]
    assert f"h_0 (the embeddings: {-shift} in the trainer's count)" in mapping.lines()[0]


def test_a_format_that_needs_three_layers_names_those_that_there_are(tmp_path: Path) -> None:
    few = exportable_store(tmp_path / "few", "post_norm", lengths=(9,), layers=(4, 6))
    many = exportable_store(tmp_path / "many", "post_norm", lengths=(9,), layers=(0, 2, 4, 6))
    for to in ("specforge", "angelslim"):
        refused(few, tmp_path / "x", to, f"{to} takes 3 layers, and 2 are chosen; expected --layers with 3 of 4, 6")
        refused(many, tmp_path / "x", to, f"{to} takes 3 layers, and 4 are chosen; expected --layers with 3 of 0, 2, 4, 6")
    refused(many, tmp_path / "x", "eagle", "eagle takes no layers.*, and 1 are chosen; expected no --layers", layers=(2,))
    write(many, tmp_path / "x", "angelslim", layers=(0, 4, 6))
    raw = load(tmp_path / "x" / "rank_0" / "rows_0-2000" / "data_0.ckpt")
    assert np.array_equal(bits(raw["hidden_states"])[0], many.built.states[0][:, [0, 2, 3]].reshape(9, -1))
    assert np.array_equal(bits(raw["target_hiddens"])[0], many.built.states[0][:, -1])


def test_a_final_state_may_be_chosen_where_the_format_takes_either(pre: Truth, tmp_path: Path) -> None:
    """Not every trainer of ModelOpt knows the norm of every model."""
    chosen = ("export", str(pre.path), str(tmp_path / "chosen"), "--to", "modelopt", "--final", "post_norm")
    assert main(list(chosen)) == 0
    write(pre, tmp_path / "as-stored", "modelopt")
    write(pre, tmp_path / "eagle", "eagle")
    for row in range(len(LENGTHS)):
        ours, stored = (load(tmp_path / name / f"sample_{row:08d}.pt") for name in ("chosen", "as-stored"))
        wanted = load(tmp_path / "eagle" / "samples" / "rows_0-2000" / f"data_{row}.ckpt")["hidden_state"]
        assert torch.equal(ours["hidden_states"], wanted)
        assert torch.equal(ours["aux_hidden_states"], stored["aux_hidden_states"])
        assert (ours["hidden_states_prenorm"], stored["hidden_states_prenorm"]) == (False, True)
        assert np.array_equal(bits(stored["hidden_states"]), pre.built.states[row][:, -1])
    refused(pre, tmp_path / "x", "specforge", "specforge takes post_norm, and --final is pre_norm", final="pre_norm")
    refused(pre, tmp_path / "chosen", "modelopt", "holds another export: states")


@pytest.mark.parametrize(("less", "words"), [({"kept": "loss"}, "of some tokens alone"), ({"dtype": "fp8_e4m3"}, "fp8 values")])
def test_a_store_that_keeps_less_is_refused_and_told_why(tmp_path: Path, less: dict[str, Any], words: str) -> None:
    truth = exportable_store(tmp_path / "store", "pre_norm", lengths=(40,), **less)
    refused(truth, tmp_path / "x", "specforge", rf"\(hsx-store-3\) holds .*{words}; expected all tokens as bf16")


def test_a_sample_that_was_committed_anew_is_written_again(tmp_path: Path) -> None:
    """A canary may fail after a sample was exported: its commit is revoked then, and it is extracted again."""
    truth = exportable_store(tmp_path / "store", "post_norm")
    folder = tmp_path / "x"
    write(truth, folder, "safetensors")
    files = {row.row: folder / row.file for row in read_rows(folder / "hsx-rows.jsonl")}
    before = {row: path.stat().st_mtime_ns for row, path in files.items()}
    again = random_states(np.random.default_rng(99), LENGTHS[3], 4, WIDTH)
    root = next(root for root in truth.built.roots if root.name == truth.built.rows[3].root)
    truth.built.view.unlink(3)
    root.discard(3)
    with pytest.raises(RunError, match="is not committed"):
        write(truth, folder, "safetensors", ids=["sample-3"])
    root.write(payload(Marker(RUN, 3, 2, LENGTHS[3]), again, truth.built.input_ids[3]))
    root.sync()
    truth.built.view.link(3, root.name)
    done = write(truth, folder, "safetensors")
    assert (done.done, done.kept) == (len(LENGTHS), len(LENGTHS) - 1)
    assert np.array_equal(bits(load_file(files[3])["hidden_states"]), again)
    assert {row for row, path in files.items() if path.stat().st_mtime_ns != before[row]} == {3}
    assert write(truth, folder, "safetensors").kept == len(LENGTHS)


def test_a_lost_shard_stops_the_export_and_names_the_sample(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "post_norm")
    truth.built.shard(3).unlink()
    with pytest.raises(RunError, match=r"^\[store_invalid\] row 3, sample 'sample-3': shard .*; what is written stays$"):
        write(truth, tmp_path / "x", "specforge", threads=4)
    there = {path.name for path in (tmp_path / "x").rglob("*.ckpt*")}
    assert "data_3.ckpt" not in there
    assert not [name for name in there if name.endswith(".partial")]
    done = write(truth, tmp_path / "rest", "specforge", ids=[f"sample-{row}" for row in (0, 1, 2, 4)])
    assert done.done == 4


def test_an_error_in_one_thread_stops_the_others_after_what_they_have_begun(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "post_norm", lengths=(3,) * 40)
    truth.built.shard(2).unlink()
    truth.built.shard(4).unlink()
    with pytest.raises(RunError, match="row 2, sample 'sample-2'"):
        write(truth, tmp_path / "x", "specforge", threads=4)
    there = {int(path.stem.removeprefix("data_")) for path in (tmp_path / "x").rglob("*.ckpt")}
    assert {0, 1} <= there <= {0, 1, 3, 5, 6, 7}
    assert [row.row for row in read_rows(tmp_path / "x" / "hsx-rows.jsonl")] == [0, 1]


def test_an_interrupt_leaves_whole_files_and_is_gone_on_with(pre: Truth, tmp_path: Path) -> None:
    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(plan(Store(pre.path), load_format("specforge"), tmp_path, Request(threads=4)), interrupt)
    there = list((tmp_path / "rows_0-2000").iterdir())
    assert 1 <= len(there) <= len(LENGTHS)
    assert all(len(load(path)["input_ids"]) in LENGTHS for path in there)
    assert [path.suffix for path in there] == [".ckpt"] * len(there)
    done = write(pre, tmp_path, "specforge")
    assert (done.done, done.kept) == (len(LENGTHS), 1)


def test_a_missing_root_is_told_before_a_file_claims_its_samples(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "post_norm")
    (tmp_path / "store" / "b").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"row \d, sample 'sample-\d': .*") as caught:
        write(truth, tmp_path / "x", "specforge")
    assert caught.value.kind in ("root_unusable", "store_invalid")
    assert not list((tmp_path / "x").rglob("data_[13].ckpt"))
    command = ["export", str(truth.path), str(tmp_path / "x"), "--to", "specforge", "--root", f"b={tmp_path / 'elsewhere'}"]
    assert main(command) == 0
    assert len(list((tmp_path / "x").rglob("*.ckpt"))) == len(LENGTHS)


def test_a_sealed_store_is_exported_without_its_view(tmp_path: Path) -> None:
    """What is committed, and where, its own arrays say."""
    truth = exportable_store(tmp_path / "store", "pre_norm", committed=4)
    info = open_store(truth.path)
    arrays = SealedArrays.empty(info)
    for row in truth.built.rows:
        arrays.put(row.index, row.root, row.crc32c)
    write_seal(info, arrays, {"at": "now"})
    for row in truth.built.rows:
        truth.built.view.unlink(row.index)
    assert write(truth, tmp_path / "x", "safetensors").done == 4
    assert read_manifest(tmp_path / "x")["left_out"] == {"not_committed": 1}
    for index in range(4):
        found = load_file(tmp_path / "x" / "rows_0-2000" / f"sample_{index}.safetensors")["hidden_states"]
        assert np.array_equal(bits(found), truth.built.states[index])
    assert write(truth, tmp_path / "x", "safetensors").kept == 4


def test_another_vocabulary_is_another_export(pre: Truth, tmp_path: Path) -> None:
    write(pre, tmp_path / "x", "specforge", draft_vocab=10, vocab_size=300)
    refused(pre, tmp_path / "x", "specforge", "vocab_size is 300 there; expected 400", draft_vocab=10, vocab_size=400)


def test_parts_of_another_number_would_give_angelslim_samples_twice(pre: Truth, tmp_path: Path) -> None:
    """Its loader takes all files of all ranks."""
    write(pre, tmp_path / "x", "angelslim", part=1, parts=2)
    refused(pre, tmp_path / "x", "angelslim", "parts is 2 there; expected 1")
    write(pre, tmp_path / "x", "angelslim", part=0, parts=2)
    assert sorted(path.name for path in (tmp_path / "x").rglob("*.ckpt")) == [f"data_{row}.ckpt" for row in range(5)]


def test_the_stores_own_folders_take_no_export(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "post_norm", lengths=(9,))
    (tmp_path / "link").symlink_to(truth.path)
    own = [truth.path, truth.path / "x", tmp_path / "link" / "x", tmp_path / "link"]
    own += [truth.built.info.folder(root.name) / "x" for root in truth.built.roots]
    for folder in own:
        refused(truth, folder, "eagle", "which is the store's; expected a folder of its own")
    assert not list(tmp_path.rglob("hsx-export.json"))


def test_targets_that_are_no_folder_of_this_export(pre: Truth, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "hsx-notes.txt").touch()
    refused(pre, tmp_path / "x", "eagle", r"has hsx-notes\.txt and no hsx-export\.json")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunError) as caught:
        write(pre, tmp_path / "dangling", "eagle")
    assert caught.value.kind == "export_unwritable"
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    assert write(pre, tmp_path / "linked", "eagle").done == len(LENGTHS)
    assert (tmp_path / "real" / "samples").is_dir()


NAMES = (
    "../../escaped",
    "/absolute/path",
    "with\nnewline",
    "nul\0inside",
    "long" * 500,
    "Case",
    "case",
    unicodedata.normalize("NFC", "\u00e9"),
    unicodedata.normalize("NFD", "\u00e9"),
    "-",
    "carriage\rreturn",
    " ",
)


def test_an_id_is_data_and_never_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids that a file system would change, refuse, or mistake for each other; and back through an import."""
    truth = exportable_store(tmp_path / "store", "post_norm", lengths=(8,) * len(NAMES), names=NAMES)
    for to in FORMATS:
        if to == "speculators":  # wants pre_norm
            continue
        write(truth, tmp_path / to, to)
        rows = sorted(read_rows(tmp_path / to / "hsx-rows.jsonl"), key=lambda row: row.row)
        assert tuple(row.id for row in rows) == NAMES
        assert all((tmp_path / to / row.file).is_file() for row in rows)
    assert not list(tmp_path.rglob("escaped*"))
    for row, name in enumerate(NAMES):
        assert load(tmp_path / "modelopt" / f"sample_{row:08d}.pt")["conversation_id"] == name
    assert main(["import", str(tmp_path / "specforge"), str(tmp_path / "back"), "--from", "specforge"]) == 0
    assert tuple(hsx.open(tmp_path / "back").sample_id(row) for row in range(len(NAMES))) == NAMES
    capsys.readouterr()
    ids = tmp_path / "ids"
    ids.write_bytes("\ufeffcase\r\n\r\ncarriage\rreturn\r\ncase\n".encode())
    command = ["export", str(truth.path), str(tmp_path / "chosen"), "--to", "modelopt", "--ids", str(ids), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2
    assert [row.id for row in read_rows(tmp_path / "chosen" / "hsx-rows.jsonl")] == ["case", "carriage\rreturn"]
    for stranger in ("CASE", "\u00c9", "..", "case/", "escaped\0", "x" * 100_000):
        ids.write_text(stranger)
        assert main([*command[:2], str(tmp_path / "none"), *command[3:]]) != 0
        assert "[sample_unknown] no sample has the id" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "0"],
        ["--max-tokens", "-1"],
        ["--shard", "3/2"],
        ["--shard=-1/2"],
        ["--shard", "0/0"],
        ["--threads", "0"],
        ["--layers", "2,last"],
        ["--layers", ""],
    ],
)
def test_numbers_that_cannot_be_are_refused(pre: Truth, tmp_path: Path, arguments: list[str]) -> None:
    try:
        code = main(["export", str(pre.path), str(tmp_path / "x"), "--to", "eagle", *arguments])
    except SystemExit as refusal:
        code = int(str(refusal.code))
    assert code == 2
    assert not (tmp_path / "x").exists()


def test_shard_0_of_1_is_the_whole_export(pre: Truth, tmp_path: Path) -> None:
    assert main(["export", str(pre.path), str(tmp_path / "x"), "--to", "eagle", "--shard", "0/1"]) == 0
    assert write(pre, tmp_path / "x", "eagle").kept == len(LENGTHS)


def test_ids_that_choose_nothing_are_told(pre: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids").write_text("\n\n")
    assert main(["export", str(pre.path), str(tmp_path / "x"), "--to", "eagle", "--ids", str(tmp_path / "ids")]) == 2
    assert "has no sample to export: 5 not_in_ids" in capsys.readouterr().err


def test_two_processes_may_write_one_shared_file_at_once(tmp_path: Path) -> None:
    """In two containers both may well have the same process id."""
    with whole_file(tmp_path / "a", shared=True) as first:
        first.write(b"half ")
        with whole_file(tmp_path / "a", shared=True) as second:
            second.write(b"the other's")
        first.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"half whole"
    assert os.listdir(tmp_path) == ["a"]  # noqa: PTH208 - names alone


def test_long_samples_do_not_make_an_arrow_dataset_need_more_memory() -> None:
    from hsx.export import arrow
    from hsx.export.protocol import IndexRow

    row = IndexRow(np.zeros(1 << 20, np.int32), np.zeros(1 << 20, np.uint8))
    short = IndexRow(np.zeros(3, np.int32), np.zeros(3, np.uint8))
    assert [len(batch) for batch in arrow._batches(iter([row] * 9))] == [4, 4, 1]
    assert [len(batch) for batch in arrow._batches(iter([short] * 2001))] == [1000, 1000, 1]


def test_what_a_draft_vocabulary_covers_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is written, so that its size can be chosen; what does not count for the loss is no matter."""
    ids = [np.array([3, 3, 3, 7, 7, 9, 200, 200, 200, 200], np.int32), np.array([3, 9], np.int32)]
    masks = [np.array([1, 1, 1, 1, 1, 1, 0, 0, 0, 1], np.uint8), np.array([1, 0], np.uint8)]
    states = [random_states(np.random.default_rng(3), len(each), 4, 32) for each in ids]
    built = build_store(tmp_path, states, input_ids=ids, masks=masks, spec=CaptureSpec((2, 4, 7), "post_norm"))
    command = ["export", str(built.info.path), str(tmp_path / "x"), "--to", "specforge", "--vocab-size", "256", "--dry-run"]
    for draft, share, covered in ((1, "50.00 %", 4), (2, "75.00 %", 6), (4, "100.00 %", 8), (100, "100.00 %", 8)):
        assert main([*command, "--draft-vocab", str(draft)]) == 0
        words = f"{draft} of 256 tokens have {share} of the 8 that count for the loss; 4 different ones occur"
        assert f"  draft vocabulary: {words}\n" in capsys.readouterr().out
        assert main([*command, "--draft-vocab", str(draft), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["draft_coverage"]
        assert told == {"counted": 8, "covered": covered, "distinct": 4, "share": covered / 8}
    assert main(command) == 0
    assert "draft vocabulary" not in capsys.readouterr().out
    assert coverage(np.zeros(0, np.int64), 3).share == 1


def test_the_draft_vocabulary_counts_where_the_loss_does(tmp_path: Path) -> None:
    """Ties go to the lower id; what is left of the draft's places, to the lowest ids that never occur."""
    ids = [np.array([7, 7, 7, 9, 9, 3, 3, 200, 200, 200], np.int32)]
    masks = [np.array([1, 1, 0, 1, 1, 1, 1, 0, 0, 1], np.uint8)]
    states = [random_states(np.random.default_rng(0), 10, 4, WIDTH)]
    built = build_store(tmp_path, states, input_ids=ids, masks=masks, spec=CaptureSpec((2, 4, 7), "post_norm"))
    assert isinstance(built.info.layout, StoreLayout)
    for draft, chosen in ((2, [3, 7]), (3, [3, 7, 9]), (4, [3, 7, 9, 200]), (6, [0, 1, 3, 7, 9, 200])):
        folder = tmp_path / f"x{draft}"
        export(plan(Store(built.info.path), load_format("specforge"), folder, Request(draft_vocab=draft, vocab_size=256)))
        found = torch.load(folder / "vocab_mapping" / "vocab_mapping.pt", weights_only=True)
        assert (found["d2t"].dtype, found["t2d"].dtype, len(found["t2d"])) == (torch.int64, torch.bool, 256)
        assert (found["d2t"] + torch.arange(draft)).tolist() == chosen
        assert found["t2d"].nonzero().flatten().tolist() == chosen


def test_an_unfinished_list_line_of_half_a_character_is_no_row(pre: Truth, tmp_path: Path) -> None:
    write(pre, tmp_path, "eagle")
    path = tmp_path / "hsx-rows.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    for wrong in ({"id": 5}, {"id": "\ud800"}, {"row": "1"}, {"file": None}):
        path.write_text(json.dumps({**line, **wrong}) + "\n")
        refused(pre, tmp_path, "eagle", "line 1 is no row of an export")


def test_ids_come_from_standard_input_too(pre: Truth, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hsx", "export", str(pre.path), str(tmp_path / "x"), "--to", "eagle", "--ids", "-"]
    assert subprocess.run(command, input=b"sample-1\r\nsample-3", timeout=300).returncode == 0
    assert [row.id for row in read_rows(tmp_path / "x" / "hsx-rows.jsonl")] == ["sample-1", "sample-3"]
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True, timeout=300)
    assert (closed.returncode, "[usage] --ids - reads standard input, which is closed" in closed.stderr) == (2, True)
