"""Indexing a dataset: refusing or skipping bad rows, and what is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hsx.datasets.jsonl import JsonlFile
from hsx.datasets.rows import Limits
from hsx.datasets.tokens import TokenRows
from hsx.errors import RunError
from hsx.index import BAD_ROWS_FILE, IndexSummary, bucket_of, build_index, recorded_bad_rows
from hsx.stores.tokens import TokenTable, is_complete

if TYPE_CHECKING:
    from hsx.records import BadRow

Write = Callable[[bytes], Path]
GOOD = b'{"id": "a", "input_ids": [1, 2, 3]}\n{"id": "b", "input_ids": [4]}\n{"id": "c", "input_ids": [5, 6, 7, 8, 9]}\n'
MIXED = (
    GOOD + b'nonsense\n{"id": "a", "input_ids": [1]}\n{"id": "d", "input_ids": [100]}\n{"id": "e", "input_ids": [1, 2, 3]}\n'
)


class Indexing:
    """Runs `build_index` in a folder and keeps what it reported."""

    def __init__(self, folder: Path) -> None:
        self.group = folder / "store"
        self.state = folder / "job"
        self.steps: list[tuple[int, int]] = []

    @property
    def rejected(self) -> list[BadRow]:
        return list(recorded_bad_rows(self.state))

    def run(self, path: Path, *, skip: bool = False) -> IndexSummary:
        dataset = TokenRows(JsonlFile(path), Limits(vocab_size=100, max_tokens=8))
        progress = self.steps.append
        return build_index(
            dataset,
            self.group,
            "skip" if skip else "refuse",
            lambda rows, tokens: progress((rows, tokens)),
            self.state,
        )


@pytest.fixture
def indexing(tmp_path: Path) -> Indexing:
    return Indexing(tmp_path)


def test_clean_dataset(indexing: Indexing, write: Write) -> None:
    summary = indexing.run(write(GOOD))
    assert summary == IndexSummary(samples=3, tokens=9, longest=5, rejected=0, histogram={1: 1, 4: 1, 8: 1}, counted=9)
    table = TokenTable(indexing.group)
    assert [table.input_ids(index).tolist() for index in range(3)] == [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    assert indexing.rejected == []
    assert indexing.steps == [(3, 9)]
    assert not (indexing.state / BAD_ROWS_FILE).exists()


def test_recorded_fingerprint_is_the_datasets(indexing: Indexing, write: Write) -> None:
    path = write(GOOD)
    indexing.run(path)
    assert TokenTable(indexing.group).dataset == TokenRows(JsonlFile(path), Limits(100, 8)).fingerprint()


def test_refusing_lists_every_bad_row_and_writes_no_index(indexing: Indexing, write: Write) -> None:
    with pytest.raises(RunError) as caught:
        indexing.run(write(MIXED))
    assert caught.value.kind == "dataset_rejected"
    first, *lines = caught.value.message.splitlines()
    assert first.startswith("3 of 7 rows are bad")
    assert str(indexing.state / BAD_ROWS_FILE) in first
    assert [line.split(":")[0].strip() for line in lines] == ["line 4", "line 5, id 'a'", "line 6, id 'd'"]
    assert [line.split(": ")[1] for line in lines] == ["not_json", "duplicate_id", "out_of_vocabulary"]
    assert not indexing.group.exists()
    assert [row.line for row in indexing.rejected] == [4, 5, 6]


def test_rows_without_ids_are_not_to_be_skipped_but_named(indexing: Indexing, write: Write) -> None:
    path = write(b'{"input_ids": [1]}\n{"input_ids": [2]}\n')
    for skip, kind in ((False, "dataset_rejected"), (True, "dataset_empty")):
        with pytest.raises(RunError, match="no row has an 'id': name the field") as caught:
            indexing.run(path, skip=skip)
        assert caught.value.kind == kind
        assert "on_bad_row" not in caught.value.message


def test_one_bad_row_is_told_in_the_singular(indexing: Indexing, write: Write) -> None:
    with pytest.raises(RunError, match=r"\] 1 of 4 rows is bad .*leaves it out"):
        indexing.run(write(GOOD + b"bad\n"))


def test_refusing_many_shows_fifty_and_keeps_all_in_the_file(indexing: Indexing, write: Write) -> None:
    with pytest.raises(RunError) as caught:
        indexing.run(write(GOOD + b"bad\n" * 120))
    lines = caught.value.message.splitlines()
    assert len(lines) == 52
    assert lines[-1].strip() == "... and 70 more"
    listed = [json.loads(line) for line in (indexing.state / BAD_ROWS_FILE).read_text(encoding="utf-8").splitlines()]
    assert [row["line"] for row in listed] == list(range(4, 124))
    assert listed[0].keys() == {"line", "sample_id", "reason", "message", "unit"}


def test_skipping_records_bad_rows(indexing: Indexing, write: Write) -> None:
    summary = indexing.run(write(MIXED), skip=True)
    assert (summary.samples, summary.rejected) == (4, 3)
    assert [(row.line, row.reason) for row in indexing.rejected] == [
        (4, "not_json"),
        (5, "duplicate_id"),
        (6, "out_of_vocabulary"),
    ]
    table = TokenTable(indexing.group)
    assert [table.sample_id(index) for index in range(table.count)] == ["a", "b", "c", "e"]


@pytest.mark.parametrize(("content", "expected"), [(b"\n", "no usable row"), (b"bad\nworse\n", "all 2 rows are bad")])
def test_no_usable_row(indexing: Indexing, write: Write, content: bytes, expected: str) -> None:
    with pytest.raises(RunError, match=expected) as caught:
        indexing.run(write(content), skip=True)
    assert caught.value.kind == "dataset_empty"
    assert not is_complete(indexing.group)


def test_failing_file_leaves_no_index(indexing: Indexing, write: Write) -> None:
    with pytest.raises(RunError) as caught:
        indexing.run(write(GOOD + b'{"id": "\xff"}'))
    assert caught.value.kind == "dataset_unreadable"
    assert not indexing.group.exists()


def test_list_of_an_earlier_refusal_goes_away(indexing: Indexing, write: Write) -> None:
    with pytest.raises(RunError):
        indexing.run(write(MIXED))
    indexing.run(write(GOOD))
    assert not (indexing.state / BAD_ROWS_FILE).exists()


def test_state_folder_that_cannot_be_written(indexing: Indexing, write: Write) -> None:
    indexing.state.write_bytes(b"a file in the folder's place")
    with pytest.raises(RunError, match="cannot be written") as caught:
        indexing.run(write(MIXED), skip=True)
    assert caught.value.kind == "ledger_failed"
    assert not is_complete(indexing.group)


def test_recorded_bad_rows_are_those_of_the_last_run(indexing: Indexing, write: Write) -> None:
    assert list(recorded_bad_rows(indexing.state)) == []
    indexing.run(write(MIXED), skip=True)
    assert list(recorded_bad_rows(indexing.state)) == indexing.rejected


def test_progress_is_reported_each_thousand_rows(indexing: Indexing, write: Write) -> None:
    indexing.run(write(b"".join(b'{"id": %d, "input_ids": [1]}\n' % number for number in range(2500))))
    assert indexing.steps == [(1000, 1000), (2000, 2000), (2500, 2500)]


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8192, 8192), (8193, 16384)])
def test_buckets_are_powers_of_two(tokens: int, bucket: int) -> None:
    assert bucket_of(tokens) == bucket
