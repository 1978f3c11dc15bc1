"""Writes datasets with the package `datasets`: `python datasets_program.py OUT`.

OUT/rows.json has their rows, as the package itself reads them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Json, LargeList, List, Value, load_from_disk

ROWS = 40
TURNS = [{"role": Value("string"), "content": Value("string"), "name": Value("string")}]


def rows() -> dict[str, list[Any]]:
    """Columns: token ids, masks in all forms with rows that lack them, conversations with fields that not all turns have."""
    ids = [[(7 * row + place) % 500 for place in range(1 + row % 9)] for row in range(ROWS)]
    masks = [[int(3 * place > row % 7) for place in range(len(each))] for row, each in enumerate(ids)]
    labels = [[t if m else -100 for t, m in zip(*pair, strict=True)] for pair in zip(ids, masks, strict=True)]
    turns = [[{"role": "user", "content": f"é {row}"}, {"role": "tool", "content": "1", "name": "f"}] for row in range(ROWS)]
    return {
        "id": [f"row-{row}" for row in range(ROWS)],
        "input_ids": ids,
        "loss_mask": [mask if row % 3 else None for row, mask in enumerate(masks)],
        "labels": [each if row % 4 else None for row, each in enumerate(labels)],
        "messages": [[{"name": None, **turn} for turn in each] for each in turns],
    }


def features(ids: Any, mask: Any, labels: Any) -> Features:
    """Of those columns."""
    return Features({"id": Value("string"), "input_ids": ids, "loss_mask": mask, "labels": labels, "messages": TURNS})


def main(out: Path) -> None:
    """Writes all forms."""
    wide = features(LargeList(Value("int64")), List(Value("int8")), LargeList(Value("int64")))
    narrow = features(List(Value("int32")), LargeList(Value("bool")), List(Value("int16")))
    whole = Dataset.from_dict(rows(), features=wide)
    picked = whole.select([9, 3, 30, 31, 2, 17, 0, 39])
    assert picked._indices is not None
    shuffled = whole.cast(narrow).shuffle(seed=3).filter(lambda row: len(row["input_ids"]) > 2)
    mapped = picked.map(lambda row: {"id": f"mapped {row['id']}", "input_ids": row["input_ids"][:2], "prompt_length": 1})
    mapped = mapped.remove_columns(["loss_mask", "labels", "messages"])
    same = Dataset.from_dict({"id": [4, 5, 6, 7], "input_ids": [[1, 2, 3]] * 4}).select([3, 1])
    same = same.cast(Features({"id": Value("int32"), "input_ids": List(Value("int32"), length=3)}))
    turns: list[Any] = [[{"role": "user", "content": "a"}], [{"role": "tool", "content": [{"type": "text", "text": "b"}]}]]
    mixed = Dataset.from_dict(
        {"id": ["a", "b"], "messages": turns}, features=Features({"id": Value("string"), "messages": List(Json())})
    )
    saved: dict[str, Dataset] = {
        "shards": whole,
        "picked": picked,
        "shuffled": shuffled,
        "mapped": mapped,
        "fixed": same,
        "formatted": whole.cast(narrow).with_format("numpy", columns=["input_ids"]),
        "json": mixed,
    }
    found = {}
    for name, dataset in saved.items():
        dataset.save_to_disk(out / name, num_shards=1 if len(dataset) < 8 else 3)
        dataset.to_parquet(out / f"{name}.parquet", batch_size=5)
        read = load_from_disk(out / name).with_format(None)
        found[name] = found[f"{name}.parquet"] = [read[row] for row in range(len(read))]
    DatasetDict({"train": picked}).save_to_disk(out / "splits")
    found["splits"] = found["picked"]
    (out / "rows.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
