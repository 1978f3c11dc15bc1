"""Who has the same prompt: found by hashes, proved by ids; in groups that are not too long; and what a plan says of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsx.cli import main
from hsx.exit_codes import ExitCode
from hsx.testing.tiny_job import make_job
from hsx.testing.twin_rows import write_rows
from hsx.twins import find_twins, followers, key

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from numpy.typing import NDArray


class Given:
    """Prompts in memory."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._rows = [np.array(row, np.int32) for row in rows]

    @property
    def count(self) -> int:
        return len(self._rows)

    def input_ids(self, index: int) -> NDArray[np.int32]:
        return self._rows[index]


@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=2), min_size=1), most=st.integers(1, 5))
def test_groups_are_those_of_equal_ids(rows: list[list[int]], most: int) -> None:
    found = find_twins(Given(rows), most).tolist()
    for index, row in enumerate(rows):
        same = [other for other, ids in enumerate(rows) if ids == row]
        place = same.index(index) // most * most
        group = same[place : place + most]
        assert found[index] == (group[0] if len(group) > 1 else -1)
    keys = np.array([key(np.array(row, np.int32)) for row in rows], np.int64)
    assert followers(keys, most).tolist() == [0 <= first != index for index, first in enumerate(found)]


def test_a_plan_says_what_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path)
    write_rows(tmp_path)
    file = str(tmp_path / "job.toml")
    assert main(["plan", file, "--json"]) == ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["samples"], told["tokens"]) == (6, 40 + 70 + 1 + 64 + 90 + 33)
    assert (told["shared"], told["shared_tokens"]) == (4, 40 + 70 + 40 + 90)
    assert told["shared_bytes"] > 0
    assert main(["plan", file]) == ExitCode.DONE
    assert "4 more samples with the same prompt as another one: 240 tokens" in capsys.readouterr().out
