"""Small job folders: a job file that works, beside a model's config.json and a dataset of a few rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from hsx.commands.toml_text import to_toml
from hsx.config import Config

if TYPE_CHECKING:
    from pathlib import Path

MODEL = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": 4096}


def job_document(folder: Path) -> dict[str, Any]:
    """A job file as plain data; every path lies under `folder`, and the staging budget takes the longest sample."""
    return {
        "job": {"name": "tiny", "store": "store.zarr"},
        "model": {"path": "model"},
        "dataset": {"path": "rows.jsonl"},
        "capture": {"layers": [1, 3]},
        "staging": {"dump_dir": str(folder / "dumps"), "max_bytes": "64MiB"},
        "roots": [{"name": "a", "path": "root-a", "reserve": "0B"}],
    }


def write_job(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """Writes job file, model config, dataset and roots into `folder`; returns the job file's path.

    Args:
        folder: an existing folder.
        changes: by section, keys to set; a value of None takes the key out. `roots` is replaced whole.
    """
    document = job_document(folder)
    for section, values in (changes or {}).items():
        if section == "roots":
            document["roots"] = values
            continue
        merged = {**document.get(section, {}), **values}
        document[section] = {key: value for key, value in merged.items() if value is not None}
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    rows = [{"id": f"row-{number}", "input_ids": list(range(1, number + 2))} for number in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for root in document["roots"]:
        (folder / root.get("path", "root")).mkdir(parents=True, exist_ok=True)
    job = folder / "job.toml"
    job.write_text(to_toml(document), encoding="utf-8")
    return job


def dataset_config(path: Path, model: Path | str = "model", **dataset: Any) -> Config:  # noqa: ANN401 - any key of the section
    """A job file's config of which only dataset and model matter.

    Args:
        path: the dataset.
        model: the model's folder.
        dataset: further keys of the section.
    """
    return msgspec.convert(
        {
            "job": {"name": "j", "store": "s"},
            "model": {"path": str(model)},
            "dataset": {"path": str(path), **dataset},
            "capture": {"layers": [1]},
            "staging": {"dump_dir": "d"},
            "roots": [{"name": "a", "path": "a"}],
        },
        Config,
    )
