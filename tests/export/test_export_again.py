"""`hsx export` that is cut short, runs in several processes, or whose store or disk changes meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.errors import RunError
from hsx.export import load_format
from hsx.export.manifest import read_rows
from hsx.export_run import Progress, export
from hsx.exporting import Request, plan
from hsx.stores.reader import Store
from hsx.testing.exports import Truth, exportable_store

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = textwrap.dedent(
    """
    import json, os, signal, sys
    from functools import partial
    from pathlib import Path
    from hsx.export import load_format
    from hsx.export_run import export
    from hsx.exporting import Request, plan
    from hsx.stores.reader import Store
    from hsx.testing.forks import begin, ended

    def die(progress):
        if progress.done == progress.kept + 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def attempt(folder, to, part, parts, link, watch):
        request = Request(part=part, parts=parts, link=link, draft_vocab=60, vocab_size=300, threads=1)
        export(plan(Store(sys.argv[1]), load_format(to), Path(sys.argv[2], folder), request), watch)

    def until_done(*how):
        codes = [-signal.SIGKILL]
        while codes[-1] == -signal.SIGKILL:
            codes.append(ended(begin(partial(attempt, *how, die))))
        return codes[1:]

    at_once = [begin(partial(attempt, "two", "speculators", part, 2, False, lambda _: None)) for part in range(2)]
    codes = {
        "two": [ended(pid) for pid in at_once],
        "links": [until_done("links", "speculators", part, 2, True) for part in range(2)],
        "killed": until_done("killed", "specforge", 0, 1, False),
    }
    Path(sys.argv[2], "codes.json").write_text(json.dumps(codes))
    """
)
LENGTHS = (40, 40, 64, 40, 9, 64, 40)
TWINS = {1: 0, 3: 0, 5: 2}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A store of which some samples share a shard."""
    return exportable_store(tmp_path_factory.mktemp("twins"), "pre_norm", lengths=LENGTHS, twins=TWINS)


@pytest.fixture(scope="module")
def attempts(twins: Truth, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports `two`, `links` and `killed`, by attempts that ran at once or died, and how these ended in `codes.json`."""
    out = tmp_path_factory.mktemp("attempts")
    done = subprocess.run([sys.executable, "-c", PROGRAM, twins.path, out], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return out


def codes(attempts: Path, name: str) -> Any:
    return json.loads((attempts / "codes.json").read_bytes())[name]


def write(truth: Truth, folder: Path, to: str, **how: Any) -> Progress:
    return export(plan(Store(truth.path), load_format(to), folder, Request(draft_vocab=60, vocab_size=300, **how)))


def content(folder: Path) -> dict[str, bytes]:
    """All files of an export that a trainer may see."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith((".", "hsx-")))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def shared(folder: Path) -> set[frozenset[int]]:
    """Rows whose files are one."""
    inodes: dict[int, set[int]] = {}
    for path in folder.glob("hsx-rows*.jsonl"):
        for row in read_rows(path):
            inodes.setdefault((folder / row.file).stat().st_ino, set()).add(row.row)
    return {frozenset(rows) for rows in inodes.values()}


def test_two_processes_write_one_export_at_once(twins: Truth, attempts: Path, tmp_path: Path) -> None:
    """Both write the Arrow dataset, the frequencies and the mapping as well."""
    write(twins, tmp_path / "one", "speculators")
    assert codes(attempts, "two") == [0, 0]
    assert content(attempts / "two") == content(tmp_path / "one")
    assert len(content(attempts / "two")) == len(LENGTHS) + 6
    assert not list((attempts / "two").rglob("*.partial"))


def test_parts_with_links_that_are_killed_go_on(twins: Truth, attempts: Path, tmp_path: Path) -> None:
    write(twins, tmp_path / "one", "speculators", link=True)
    assert shared(tmp_path / "one") == {frozenset({0, 1, 3}), frozenset({2, 5}), frozenset({4}), frozenset({6})}
    assert codes(attempts, "links") == [[-9, -9, 0], [-9, 0]]  # of 4 and of 3 files
    assert content(attempts / "links") == content(tmp_path / "one")
    # Of each part by itself: 0, 2, 4, 6 and 1, 3, 5.
    assert shared(attempts / "links") == {frozenset({1, 3}), *(frozenset({row}) for row in (0, 2, 4, 5, 6))}


def test_a_full_disk_stops_it_and_room_lets_it_go_on(tmp_path: Path, small_disk: Path) -> None:
    truth = exportable_store(tmp_path / "store", "pre_norm", lengths=(1500,) * 4)  # 400 KB each
    folder = small_disk / "x"
    with pytest.raises(RunError, match=r"[0-9.]+ MB free; expected .* MB for this part") as caught:
        write(truth, folder, "specforge")
    assert caught.value.kind == "export_unwritable"
    with pytest.raises(RunError, match="cannot be written: No space left") as caught:  # links might have needed less
        write(truth, folder, "specforge", link=True, threads=1)
    assert caught.value.kind == "export_unwritable"
    assert not list(small_disk.rglob("*.ckpt.partial"))
    subprocess.run(["mount", "-o", "remount,size=256m", small_disk], check=True)
    done = write(truth, folder, "specforge", link=True)
    assert (done.kept, done.done) == (2, 4)
    write(truth, tmp_path / "whole", "specforge")
    assert content(folder) == content(tmp_path / "whole")


def test_a_store_with_more_samples_is_another_export(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "pre_norm")
    last = truth.built.rows[4]
    truth.built.view.unlink(4)
    write(truth, tmp_path / "x", "specforge")
    before = content(tmp_path / "x")
    truth.built.view.link(4, last.root)
    with pytest.raises(RunError, match="holds another export: rows is 4 there; expected 5") as caught:
        write(truth, tmp_path / "x", "specforge")
    assert caught.value.kind == "export_refused"
    assert content(tmp_path / "x") == before
    ids = tmp_path / "ids"
    ids.write_text("".join(f"sample-{row}\n" for row in range(4)))
    command = ["export", str(truth.path), str(tmp_path / "x"), "--to", "specforge", "--ids", str(ids)]
    assert main([*command, "--draft-vocab", "60", "--vocab-size", "300"]) == 0  # the same rows as before
    assert content(tmp_path / "x") == before


def test_eagle_is_given_a_folder_of_nothing_but_samples(twins: Truth, tmp_path: Path) -> None:
    """Its trainer loads every file below the folder that it is given."""
    export(plan(Store(twins.path), load_format("eagle"), tmp_path, Request()))
    found = sorted(path for path in (tmp_path / "samples").rglob("*") if path.is_file())
    assert found == sorted(tmp_path / row.file for row in read_rows(tmp_path / "hsx-rows.jsonl"))
    assert len(found) == len(LENGTHS)


def test_a_killed_export_leaves_whole_files_and_is_continued(twins: Truth, attempts: Path, tmp_path: Path) -> None:
    """SIGKILL after each second file, until one attempt gets through."""
    assert codes(attempts, "killed") == [-9, -9, -9, 0]
    write(twins, tmp_path / "whole", "specforge")
    assert content(attempts / "killed") == content(tmp_path / "whole")
    assert not list((attempts / "killed").rglob("*.ckpt.partial"))
