"""The capture report and its norm file."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.capture.report import read_norm, write_refusal, write_report
from hsx.core.epoch import CaptureReport, report_from_json

if TYPE_CHECKING:
    from pathlib import Path

REPORT = CaptureReport(
    epoch="11111111-2222-4333-8444-555555555555",
    layers=(2, 5),
    final="post_norm",
    hidden_size=4,
    model_layers=8,
    vocab_size=1000,
    norm_eps=1e-6,
    norm_file="final_norm.f32",
    engine_version="0.5.23",
    plugin_version="0.1.0",
    tp_size=1,
    dp_size=1,
    rank=0,
    architecture="LlamaForCausalLM",
    method="model",
    head_multiplier=1.0,
    dtype="bfloat16",
)


def test_report_and_norm_read_back(tmp_path: Path) -> None:
    weight = np.array([1.5, 0.25, -3, 7], np.float32)
    write_report(tmp_path, REPORT, weight)
    report = report_from_json((tmp_path / "capture.json").read_text())
    assert report == REPORT
    found = read_norm(tmp_path, report)
    assert found is not None
    assert np.array_equal(found, weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["capture.json", "final_norm.f32"]


def test_unknown_norm_has_no_file(tmp_path: Path) -> None:
    report = dataclasses.replace(REPORT, norm_file="", norm_eps=0.0)
    write_report(tmp_path, report, None)
    assert read_norm(tmp_path, report) is None
    assert [p.name for p in tmp_path.iterdir()] == ["capture.json"]


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("", np.ones(4, np.float32)),
        ("final_norm.f32", None),
        ("final_norm.f32", np.ones(5, np.float32)),
        ("final_norm.f32", np.ones(4, np.float64)),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, name: str, weight: np.ndarray | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        write_report(tmp_path, dataclasses.replace(REPORT, norm_file=name), weight)
    assert list(tmp_path.iterdir()) == []


def test_torn_norm_file_is_refused(tmp_path: Path) -> None:
    write_report(tmp_path, REPORT, np.ones(4, np.float32))
    (tmp_path / "final_norm.f32").write_bytes(b"123")
    with pytest.raises(ValueError, match="has 3 bytes; expected 16"):
        read_norm(tmp_path, REPORT)


def test_refusal_is_one_sentence_in_a_file(tmp_path: Path) -> None:
    write_refusal(tmp_path, "pp_size is 2;\n expected 1")
    assert (tmp_path / "capture.error").read_text() == "pp_size is 2; expected 1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["capture.error"]


def test_a_rank_has_a_report_and_a_norm_of_its_own(tmp_path: Path) -> None:
    report = dataclasses.replace(REPORT, dp_size=2, rank=1, norm_file="final_norm.1.f32")
    write_report(tmp_path, report, np.ones(4, np.float32))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capture.1.json", "final_norm.1.f32"]
    assert report_from_json((tmp_path / "capture.1.json").read_text()) == report
    with pytest.raises(ValueError, match=r"expected 'final_norm\.1\.f32'"):
        write_report(tmp_path, dataclasses.replace(report, norm_file="final_norm.f32"), np.ones(4, np.float32))


def test_a_refusal_names_its_rank(tmp_path: Path) -> None:
    write_refusal(tmp_path, "no room", rank=3)
    assert (tmp_path / "capture.error").read_text() == "DP rank 3: no room\n"
