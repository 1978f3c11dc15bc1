"""`hsx plan --sample`: what codecs make of states that are there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.cli import main
from hsx.core.dump import DumpHeader, encode_header
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.exit_codes import ExitCode
from hsx.stores.codec_sample import try_codecs
from hsx.testing.jobs import write_job
from hsx.testing.left_job import leave_job
from hsx.testing.stores import EPOCH, build_store, random_states

if TYPE_CHECKING:
    from pathlib import Path


def test_ratio_is_payload_over_what_is_stored() -> None:
    chunks = [random_states(np.random.default_rng(0), 64, 2, 256), np.zeros((10, 2, 256), np.uint16)]
    none, blosc, zstd = try_codecs(chunks)
    assert (none.codec, none.ratio, none.write_s_per_gb, none.read_s_per_gb) == ("none", 1.0, 0.0, 0.0)
    assert (blosc.codec, zstd.codec) == ("blosc", "zstd")
    assert min(blosc.ratio, zstd.ratio) > 1.2
    assert min(blosc.write_s_per_gb, zstd.read_s_per_gb) >= 0


def test_the_jobs_own_store_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = leave_job(tmp_path)
    assert main(["plan", left.file, "--sample", "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert [trial["codec"] for trial in document["codecs"]] == ["none", "blosc", "zstd"]
    for trial in document["codecs"]:
        assert trial["stored_bytes"] == round(document["payload_bytes"] / trial["ratio"])
    assert main(["plan", left.file, "--sample"]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "none (the job's)  1.000" in text
    assert "zstd" in text
    assert main(["plan", left.file]) == ExitCode.DONE
    assert "zstd" not in capsys.readouterr().out


@pytest.mark.parametrize("chunk_tokens", [64, 16])
def test_another_store_and_dumps_are_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str], chunk_tokens: int) -> None:
    job = str(write_job(tmp_path, {"storage": {"chunk_tokens": chunk_tokens}}))
    states = random_states(np.random.default_rng(0), 200, 3, 64)
    (tmp_path / "other").mkdir()
    store = build_store(tmp_path / "other", [states]).info.path
    marker = Marker("deadbeef", 0, 1, 200)
    header = encode_header(DumpHeader(marker, EPOCH, 1, CaptureSpec((1, 3), "post_norm"), 64, "m", "e"))
    (tmp_path / "dumps").mkdir(exist_ok=True)
    dump = tmp_path / "dumps" / f"{marker}.safetensors"
    dump.write_bytes(header + states.tobytes() + np.arange(200, dtype=np.int32).tobytes())
    found = []
    for source in (store, dump, dump.parent):
        assert main(["plan", job, "--json", "--sample", str(source)]) == ExitCode.DONE
        found.append([trial["ratio"] for trial in json.loads(capsys.readouterr().out)["codecs"]])
    middle = states[(200 - chunk_tokens) // 2 :][:chunk_tokens]
    assert found == 3 * [[trial.ratio for trial in try_codecs([middle])]]


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("nowhere", "not_run_yet", "nowhere does not exist; give --sample a store or a dump of this model"),
        ("empty", "store_invalid", "empty is not an hsx store"),
        ("narrow/store", "usage", "has states of width 8; the job's model has 64"),
        ("new/store", "sample_unknown", "has no committed sample to try codecs on"),
        ("torn.safetensors", "dump_invalid", "torn.safetensors"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, kind: str, words: str
) -> None:
    job = str(write_job(tmp_path))
    for name, width, committed in (("empty", 0, 0), ("narrow", 8, 1), ("new", 64, 0)):
        (tmp_path / name).mkdir()
        if width:
            build_store(tmp_path / name, [random_states(np.random.default_rng(0), 9, 2, width)], committed=committed)
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    assert main(["plan", job, "--sample", str(tmp_path / source)]) != ExitCode.DONE
    error = capsys.readouterr().err
    assert error.startswith(f"hsx: error [{kind}]")
    assert words in error


def test_a_jobs_codec_is_named_in_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(write_job(tmp_path, {"storage": {"codec": "zstd"}}))
    assert main(["plan", job]) == ExitCode.DONE
    assert "with checksums and padding, before zstd (see --sample)" in capsys.readouterr().out
