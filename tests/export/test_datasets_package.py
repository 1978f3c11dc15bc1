"""What the package `datasets` writes is read by hsx without it, row by row as it reads it itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx.core.spec import ModelShape
from hsx.datasets import open_dataset, open_source
from hsx.datasets.fields import Bad
from hsx.records import Row
from hsx.testing.jobs import dataset_config
from hsx.testing.trainers import trainers_python

SHAPE = ModelShape(hidden_size=8, layers=4, vocab_size=500, context_length=64)
FORMS = ["shards", "picked", "shuffled", "mapped", "fixed", "formatted", "json"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the package wrote, and `rows.json`."""
    out = tmp_path_factory.mktemp("written")
    program = Path(__file__).with_name("datasets_program.py")
    done = subprocess.run(
        [str(trainers_python()), "-W", "ignore", str(program), str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=out,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "cache")},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def expected_mask(row: dict[str, Any]) -> list[int]:
    if row.get("loss_mask") is not None:
        return list(map(int, row["loss_mask"]))
    if row.get("labels") is not None:
        return [int(label != -100) for label in row["labels"]]
    prompt = row.get("prompt_length") or 0
    return [int(place >= prompt) for place in range(len(row["input_ids"]))]


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", [*FORMS, *(f"{form}.parquet" for form in FORMS), "splits"])
def test_rows_are_those_that_the_package_reads(written: Path, name: str) -> None:
    expected = json.loads((written / "rows.json").read_text(encoding="utf-8"))[name]
    assert expected
    if "input_ids" in expected[0]:
        rows = list(open_dataset(dataset_config(written / name, format="tokens"), SHAPE))
        assert all(isinstance(row, Row) for row in rows), rows
        assert [row.sample_id for row in rows] == [str(row["id"]) for row in expected]
        for row, wanted in zip(rows, expected, strict=True):
            assert isinstance(row, Row)
            assert row.input_ids.dtype == np.int32
            assert row.input_ids.tolist() == wanted["input_ids"]
            assert row.loss_mask.tolist() == expected_mask(wanted)
    if "messages" in expected[0]:
        found = [fields for _, fields in open_source(dataset_config(written / name, format="chat")).records()]
        values = [fields.value("messages") for fields in found if not isinstance(fields, Bad)]
        assert values == [without_nulls(row["messages"]) for row in expected]
