"""`hsx import` of files that were made to deceive, and of folders that are laid out as others like it."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hsx
from hsx.cli import main
from hsx.errors import RunError
from hsx.export import load_format
from hsx.export.manifest import MANIFEST
from hsx.export_run import export
from hsx.exporting import Request, plan
from hsx.importing import import_folder
from hsx.ingest.request import ImportReport, ImportRequest
from hsx.stores.reader import Store
from hsx.testing.exports import LAYERS, LENGTHS, WIDTH, Truth

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = LENGTHS[1]


def bring(folder: Path, store: Path, kind: str, **how: Any) -> ImportReport:
    roots = {"a": store.with_name(f"{store.name}.a")}
    return import_folder(ImportRequest(kind, folder, store, roots, **{"layers": LAYERS, **how}))


def bf16(bits: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16)


def listed(report: ImportReport) -> dict[str, str]:
    lines = map(json.loads, report.listing.read_text().splitlines())
    return {Path(line["file"]).name: line["reason"] for line in lines}


def parts(truth: Truth) -> tuple[dict[str, Any], bytes, bytes]:
    """The header of a connector's file, and its two tensors' bytes."""
    ids, states = truth.built.input_ids[1].astype("<i8").tobytes(), truth.built.states[1].tobytes()
    header = {
        "token_ids": {"dtype": "I64", "shape": [TOKENS], "data_offsets": [0, len(ids)]},
        "hidden_states": {"dtype": "BF16", "shape": [TOKENS, 4, WIDTH], "data_offsets": [len(ids), len(ids) + len(states)]},
    }
    return header, ids, states


def raw_file(path: Path, header: bytes, payload: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + payload)


def test_no_header_of_a_safetensors_file_is_believed(pre: Truth, tmp_path: Path) -> None:
    """Each of them in one folder; the sound one beside them is taken."""
    header, ids, states = parts(pre)
    payload = ids + states
    end = len(payload)

    def about(**tensors: dict[str, Any]) -> bytes:
        return json.dumps({name: {**header.get(name, {}), **more} for name, more in tensors.items()}).encode()

    evil: dict[str, tuple[bytes, bytes]] = {
        "overlapping": (about(token_ids={}, hidden_states={"data_offsets": [0, len(states)]}), states),
        "a hole": (about(token_ids={}, hidden_states={"data_offsets": [len(ids) + 8, end + 8]}), payload + bytes(8)),
        "more behind": (about(token_ids={}, hidden_states={}), payload + b"more"),
        "out of range": (about(token_ids={}, hidden_states={"data_offsets": [len(ids), end + 2]}), payload),
        "backwards": (about(token_ids={"data_offsets": [len(ids), 0]}, hidden_states={}), payload),
        "offsets as text": (about(token_ids={"data_offsets": ["0", str(len(ids))]}, hidden_states={}), payload),
        "offsets with a point": (about(token_ids={"data_offsets": [0.0, float(len(ids))]}, hidden_states={}), payload),
        "three offsets": (about(token_ids={"data_offsets": [0, 8, 16]}, hidden_states={}), payload),
        "shape of truths": (about(token_ids={"shape": [True]}, hidden_states={}), payload),
        "shape is an object": (about(token_ids={"shape": {}}, hidden_states={}), payload),
        "type is a list": (about(token_ids={"dtype": ["I64"]}, hidden_states={}), payload),
        "huge and empty": (
            about(token_ids={"shape": [2**70, 0], "data_offsets": [0, 0]}, hidden_states={}),
            payload[len(ids) :],
        ),
        "a bigger shape": (about(token_ids={}, hidden_states={"shape": [TOKENS * 2, 4, WIDTH]}), payload),
        "twice": (b'{"token_ids":{},' + about(token_ids={}, hidden_states={})[1:], payload),
        "a list": (b"[1, 2]", payload),
        "deep": (b"[" * 200_000, b""),
        "not text": (b'{"\xff": 1}', payload),
        "number without end": (b'{"token_ids": ' + b"9" * 10_000 + b"}", payload),
    }
    (tmp_path / "x").mkdir()
    for name, (text, data) in evil.items():
        raw_file(tmp_path / "x" / f"{name}.safetensors", text, data)
    (tmp_path / "x" / "long header.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    raw_file(tmp_path / "x" / "sound.safetensors", json.dumps(header).encode(), payload)
    report = bring(tmp_path / "x", tmp_path / "store", "vllm")
    reasons = listed(report)
    assert reasons.pop("a bigger shape.safetensors") == "tokens_differ"
    assert reasons.keys() == {f"{name}.safetensors" for name in [*evil, "long header"] if name != "a bigger shape"}
    assert set(reasons.values()) == {"unreadable"}
    assert (report.found, report.committed) == (len(evil) + 2, 1)
    assert np.array_equal(hsx.open(tmp_path / "store")["sound"].hidden_states_numpy, pre.built.states[1])


class Touch:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def sound_ckpt(truth: Truth, row: int) -> dict[str, torch.Tensor]:
    states = bf16(truth.built.states[row])
    return {
        "input_ids": torch.from_numpy(truth.built.input_ids[row].astype(np.int64)),
        "loss_mask": torch.from_numpy(truth.masks[row].astype(np.int64)),
        "aux_hidden_state": states[:, :-1].flatten(1).unsqueeze(0).clone(),
        "hidden_state": states[:, -1].unsqueeze(0).clone(),
    }


def test_ckpt_files_run_no_code_and_bring_no_import_down(post: Truth, tmp_path: Path) -> None:
    sound = sound_ckpt(post, 1)
    half = TOKENS // 2
    evil: dict[str, tuple[Any, str]] = {
        "code": ({**sound, "more": Touch(tmp_path / "executed")}, "unreadable"),
        "numbers alone": ({**sound, "hidden_state": torch.tensor(1.0, dtype=torch.bfloat16)}, "bad_shape"),
        "no width": ({**sound, "hidden_state": torch.empty(1, TOKENS, 0, dtype=torch.bfloat16)}, "bad_shape"),
        "ids in bf16": ({**sound, "input_ids": sound["input_ids"].bfloat16()}, "bad_ids"),
        "ids are floats": ({**sound, "input_ids": sound["input_ids"].double()}, "bad_ids"),
        "complex mask": ({**sound, "loss_mask": sound["loss_mask"].to(torch.complex64)}, "bad_mask"),
        "mask in bf16": ({**sound, "loss_mask": sound["loss_mask"].bfloat16()}, "bad_mask"),
        "mask of NaN": ({**sound, "loss_mask": torch.full((TOKENS,), float("nan"))}, "bad_mask"),
        "two samples": ({key: value.reshape(2, half, *value.shape[2:]) for key, value in sound.items()}, "bad_ids"),
        "two rows of states": ({**sound, "hidden_state": sound["hidden_state"].reshape(2, half, WIDTH)}, "bad_shape"),
        "sparse": ({**sound, "hidden_state": sound["hidden_state"].to_sparse()}, "bad_type"),
        "larger than it is": (
            {**sound, "hidden_state": torch.zeros(1, 1, 1, dtype=torch.bfloat16).expand(1, 2**40, WIDTH)},
            "bad_shape",
        ),
        "mixed types": ({**sound, "hidden_state": sound["hidden_state"].half()}, "bad_type"),
        "a layer short": ({**sound, "aux_hidden_state": sound["aux_hidden_state"][..., WIDTH:].clone()}, "bad_shape"),
        "id beyond": ({**sound, "input_ids": sound["input_ids"] + 2**31}, "bad_ids"),
    }
    folder = tmp_path / "x"
    folder.mkdir()
    for name, (content, _) in evil.items():
        torch.save(content, folder / f"{name}.ckpt")
    torch.save(sound, folder / "whole.ckpt")
    with zipfile.ZipFile(folder / "whole.ckpt") as whole, zipfile.ZipFile(folder / "no end.ckpt", "w") as cut:
        for item in whole.infolist():
            data = whole.read(item)
            cut.writestr(item.filename, data[:2] if item.filename.endswith("data.pkl") else data)
    needs_grad = {**sound, "hidden_state": torch.nn.Parameter(sound["hidden_state"])}
    torch.save(needs_grad, folder / "with a gradient.ckpt")
    torch.save({**sound, "input_ids": sound["input_ids"].int(), "loss_mask": sound["loss_mask"].bool()}, folder / "int32.ckpt")
    report = bring(folder, tmp_path / "store", "specforge")
    expected = {f"{name}.ckpt": reason for name, (_, reason) in evil.items()}
    assert listed(report) == {**expected, "no end.ckpt": "unreadable"}
    assert not (tmp_path / "executed").exists()
    store = hsx.open(tmp_path / "store")
    for name in ("whole", "with a gradient", "int32"):
        assert np.array_equal(store[name].hidden_states_numpy, post.built.states[1])
        assert np.array_equal(store[name].loss_mask_numpy, post.masks[1])


def test_a_dot_in_a_path_is_no_end_of_an_id(pre: Truth, post: Truth, tmp_path: Path) -> None:
    """Folders of versions, and names of requests, have dots; and file names need be no UTF-8."""
    for row, name in enumerate(("v1.0/data_0.ckpt", "v1.0/data_1.ckpt", "v1.5/data_0.ckpt")):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(sound_ckpt(post, row), tmp_path / "x" / name)
    report = bring(tmp_path / "x", tmp_path / "store", "specforge")
    assert (report.committed, report.rejected) == (3, {})
    store = hsx.open(tmp_path / "store")
    assert np.array_equal(store["v1.5/data_0"].input_ids_numpy, post.built.input_ids[2])
    (tmp_path / "y").mkdir()
    for row, raw in enumerate((b"chat.1.safetensors", b"chat.2.safetensors", b"\xff\xfe.safetensors")):
        content = {"token_ids": torch.from_numpy(pre.built.input_ids[row].astype(np.int64))}
        save_file({**content, "hidden_states": bf16(pre.built.states[row])}, tmp_path / "made")
        os.rename(tmp_path / "made", os.fsencode(tmp_path / "y") + b"/" + raw)  # noqa: PTH104 - no UTF-8
    report = bring(tmp_path / "y", tmp_path / "other", "vllm")
    assert (report.committed, report.rejected) == (3, {})
    other = hsx.open(tmp_path / "other")
    assert [other.sample_id(row) for row in range(3)] == ["chat.1", "chat.2", r"\udcff\udcfe"]


def test_one_strange_file_in_front_does_not_turn_all_others_away(pre: Truth, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for row in range(4):
        states = bf16(pre.built.states[row])
        states = states[..., :-2].contiguous() if row == 0 else states
        ids = torch.from_numpy(pre.built.input_ids[row].astype(np.int64))
        save_file({"token_ids": ids, "hidden_states": states}, tmp_path / "x" / f"{row}.safetensors")
    report = bring(tmp_path / "x", tmp_path / "store", "vllm")
    assert (report.committed, report.rejected) == (3, {"bad_shape": 1})
    assert listed(report) == {"0.safetensors": "bad_shape"}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layers": (1, 3, 6)}, r"--layers is \(1, 3, 6\), and .* says \(2, 4, 7\); expected the same, or no --layers"),
        ({"final": "pre_norm"}, r"--final is pre_norm, and .* says post_norm"),
    ],
)
def test_what_contradicts_the_manifest_is_refused(post: Truth, tmp_path: Path, how: dict[str, Any], message: str) -> None:
    """The trainer's own count of the layers, say, which would label every state with another one's name."""
    export(plan(Store(post.path), load_format("specforge"), tmp_path / "x", Request()))
    with pytest.raises(RunError, match=message) as caught:
        bring(tmp_path / "x", tmp_path / "store", "specforge", **how)
    assert caught.value.kind == "import_refused"
    assert bring(tmp_path / "x", tmp_path / "store", "specforge").committed == len(LENGTHS)


@pytest.mark.parametrize(
    ("made_for", "kind", "expected"),
    [
        ("specforge", "vllm", "expected --from specforge"),
        ("safetensors", "vllm", "is an export to safetensors; expected one to specforge or speculators"),
        ("modelopt", "specforge", "is an export to modelopt; expected one to specforge or speculators"),
    ],
)
def test_exports_that_cannot_come_back_are_told(post: Truth, tmp_path: Path, made_for: str, kind: str, expected: str) -> None:
    export(plan(Store(post.path), load_format(made_for), tmp_path / "x", Request()))
    with pytest.raises(RunError, match=expected) as caught:
        bring(tmp_path / "x", tmp_path / "store", kind)
    assert caught.value.kind == "import_refused"


def test_a_manifest_that_says_nothing_is_told(post: Truth, tmp_path: Path) -> None:
    export(plan(Store(post.path), load_format("specforge"), tmp_path / "x", Request()))
    manifest = json.loads((tmp_path / "x" / MANIFEST).read_text())
    wrong: list[Any] = [{"mapping": None}, {"mapping": {"layers": 3, "final": "post_norm"}}, {"to": None}]
    wrong.append({"mapping": {"layers": [2, 4, 7], "final": "none"}})
    for change in wrong:
        (tmp_path / "x" / MANIFEST).write_text(json.dumps({**manifest, **change}))
        with pytest.raises(RunError) as caught:
            bring(tmp_path / "x", tmp_path / "store", "specforge")
        assert caught.value.kind == "import_refused"


@pytest.mark.parametrize(
    ("text", "message"), [("[" * 200_000, "cannot be read"), ("", "cannot be read"), ('{"format": "x"}', "is no manifest")]
)
def test_a_broken_manifest_refuses_the_import(post: Truth, tmp_path: Path, text: str, message: str) -> None:
    export(plan(Store(post.path), load_format("specforge"), tmp_path / "x", Request()))
    whole = (tmp_path / "x" / MANIFEST).read_bytes()
    (tmp_path / "x" / MANIFEST).write_text(text)
    with pytest.raises(RunError, match=message) as caught:
        bring(tmp_path / "x", tmp_path / "store", "specforge")
    assert caught.value.kind == "import_refused"
    (tmp_path / "x" / MANIFEST).write_bytes(whole)
    assert bring(tmp_path / "x", tmp_path / "store", "specforge").committed == len(LENGTHS)


def test_a_broken_list_of_rows_refuses_the_import(post: Truth, tmp_path: Path) -> None:
    export(plan(Store(post.path), load_format("specforge"), tmp_path / "x", Request()))
    path = tmp_path / "x" / "hsx-rows.jsonl"
    whole = path.read_bytes()
    path.write_text('{"row": 0}\n')
    with pytest.raises(RunError, match="line 1 is no row of an export: expected an object with row, id,") as caught:
        bring(tmp_path / "x", tmp_path / "store", "specforge")
    assert caught.value.kind == "import_refused"
    path.unlink()
    path.mkdir()
    with pytest.raises(RunError, match="cannot be read: Is a directory") as caught:
        bring(tmp_path / "x", tmp_path / "store", "specforge")
    assert caught.value.kind == "import_refused"
    path.rmdir()
    path.write_bytes(whole)
    assert bring(tmp_path / "x", tmp_path / "store", "specforge").committed == len(LENGTHS)


def test_rows_of_a_dataset_without_a_file_are_listed(pre: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a generator leaves them whose disk was full; locks and parts beside the files are no samples."""
    folder = tmp_path / "x"
    export(plan(Store(pre.path), load_format("speculators"), folder, Request()))
    states = folder / "hidden_states"
    (states / "hs_3.safetensors").unlink()
    for name in ("hs_0.safetensors.lock", "hs_0.safetensors.tmp", "hs_x.safetensors"):
        (states / name).touch()
    assert main(["import", str(folder), str(tmp_path / "store"), "--from", "speculators", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["found"], report["committed"], report["rejected"]) == (5, 4, {"missing_file": 1})
    store = hsx.open(tmp_path / "store")
    for row, name in enumerate(("sample-0", "sample-1", "sample-2", "sample-4")):
        assert np.array_equal(store[row].hidden_states_numpy, pre.built.states[(0, 1, 2, 4)[row]])
        assert np.array_equal(store[name].loss_mask_numpy, pre.masks[(0, 1, 2, 4)[row]])


def test_datasets_with_rows_that_are_no_lists(pre: Truth, tmp_path: Path) -> None:
    import pyarrow as pa

    folder = tmp_path / "x"
    export(plan(Store(pre.path), load_format("speculators"), folder, Request()))
    data = folder / json.loads((folder / "state.json").read_text())["_data_files"][0]["filename"]
    ids: list[Any] = [pre.built.input_ids[row].tolist() for row in range(5)]
    masks: list[Any] = [pre.masks[row].tolist() for row in range(5)]
    ids[0], masks[1], ids[2] = None, None, [None, *ids[2][1:]]
    masks[3] = masks[3][:-1]
    table = pa.table({"input_ids": pa.array(ids, pa.large_list(pa.int32())), "loss_mask": pa.array(masks, pa.list_(pa.int8()))})
    with pa.OSFile(str(data), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    report = bring(folder, tmp_path / "store", "speculators")
    reasons = {int(name.partition(".")[0].removeprefix("hs_")): reason for name, reason in listed(report).items()}
    assert reasons == {0: "bad_ids", 1: "bad_mask", 2: "bad_ids", 3: "bad_mask"}
    assert np.array_equal(hsx.open(tmp_path / "store")["sample-4"].hidden_states_numpy, pre.built.states[4])
