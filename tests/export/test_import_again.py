"""`hsx import` that is cut short, begun again, or whose folder changes meanwhile; folders of all kinds, and very large ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hsx
from hsx.cli import main
from hsx.errors import RunError
from hsx.importing import import_folder, journal_path
from hsx.ingest import open_source
from hsx.ingest.journal import Journal
from hsx.ingest.request import ImportReport, ImportRequest
from hsx.testing.exports import LAYERS
from hsx.testing.stores import random_states

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

WIDTH = 8


class Cut(Exception):  # noqa: N818 - no error: a test cuts an import short
    """Raised by a test's `watch`."""


def fill(folder: Path, count: int, tokens: int = 5) -> list[NDArray[np.uint16]]:
    """Files of vLLM's connector, one after the other; returns their states."""
    rng = np.random.default_rng(3)
    states = [random_states(rng, tokens, len(LAYERS) + 1, WIDTH) for _ in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    for row, bits in enumerate(states):
        write(folder / f"r-{row:04}.safetensors", bits, row)
    return states


def write(path: Path, bits: NDArray[np.uint16], row: int = 0) -> None:
    ids = torch.arange(row, row + len(bits))
    save_file({"token_ids": ids, "hidden_states": torch.from_numpy(bits).view(torch.bfloat16)}, path)


def request(folder: Path, store: Path, **how: Any) -> ImportRequest:
    roots = how.pop("roots", {name: store.with_name(f"{store.name}.{name}") for name in ("a", "b")})
    return ImportRequest("vllm", folder, store, roots, layers=how.pop("layers", LAYERS), **how)


def cutting(after: int) -> Callable[[ImportReport], None]:
    """A watch that cuts the import short when it is called for the `after`th time."""
    calls = 0

    def watch(_: ImportReport) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise Cut

    return watch


def assert_holds(store: Path, states: dict[int, NDArray[np.uint16]], name: str = "r-{:04}") -> None:
    """A store has these samples, whole, and no other one."""
    found = hsx.open(store)
    assert len(found.committed) == len(states)
    for row, bits in states.items():
        sample = found[name.format(row)]
        assert np.array_equal(sample.hidden_states_numpy, bits)
        assert sample.input_ids_numpy.tolist() == list(range(row, row + len(bits)))


def test_a_killed_import_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL between the heads, then between the states; what is committed is not even there to be read again."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from hsx.importing import import_folder
        from hsx.ingest.request import ImportRequest
        from hsx.testing.forks import begin, ended

        store = Path(sys.argv[2])
        roots = {name: store.with_name(f"store.{name}") for name in "ab"}
        left = 0

        def watch(report):
            global left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        def attempt():
            import_folder(ImportRequest("vllm", Path(sys.argv[1]), store, roots, layers=(2, 4, 7)), watch)

        for call in (1, 4):
            left = call
            word = sys.stdin.readline().strip()
            print(ended(begin(attempt)), word, flush=True)
        """
    )
    folder, store = tmp_path / "x", tmp_path / "store"
    states = fill(folder, 270)

    with subprocess.Popen(
        [sys.executable, "-c", program, folder, store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None
        forks.stdin.write("between the heads\n")
        assert forks.stdout.readline() == "-9 between the heads\n"
        with Journal(journal_path(store)) as journal:
            assert (journal.stage, journal.unread()[0].at) == ("heads", 257)
        assert not store.exists()
        forks.stdin.write("after the rest of the heads, and three batches of states\n")
        assert forks.stdout.readline() == "-9 after the rest of the heads, and three batches of states\n"
    committed = hsx.open(store).committed.tolist()
    assert committed == list(range(24))
    for row in committed:
        (folder / f"r-{row:04}.safetensors").unlink()
    # As a kill leaves it within a batch: a whole shard that is not committed, and a torn one.
    ((shards,),) = ([path for path in tmp_path.joinpath("store.a").iterdir() if path.is_dir()],)
    shutil.copy(shards / "c.0.0.0.0", shards / "c.200.0.0.0")
    (shards / "c.202.0.0.0.hsx1-00000000-202-1-5.partial").write_bytes(b"torn")
    report = import_folder(request(folder, store))
    assert (report.found, report.kept, report.committed, report.rejected) == (270, 24, 270, {})
    assert report.tokens == 270 * 5
    assert_holds(store, dict(enumerate(states)))
    assert not list(shards.glob("*.partial"))
    assert not journal_path(store).exists()
    assert main(["verify", "--store", str(store)]) == 0
    with pytest.raises(RunError, match="is there already"):
        import_folder(request(folder, store))


def test_files_that_change_meanwhile_are_not_taken(tmp_path: Path) -> None:
    """Between their ids and their states: another sample, cut short, gone."""
    folder, store = tmp_path / "x", tmp_path / "store"
    states = fill(folder, 6)
    with pytest.raises(Cut):
        import_folder(request(folder, store), cutting(1))
    write(folder / "r-0001.safetensors", states[0], 1)
    os.truncate(folder / "r-0002.safetensors", 300)
    (folder / "r-0003.safetensors").unlink()
    before = (folder / "r-0004.safetensors").stat()
    write(folder / "r-0004.safetensors", states[4], 77)  # other ids under an old time and size
    os.utime(folder / "r-0004.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    write(folder / "r-0006.safetensors", states[0], 6)  # came too late
    report = import_folder(request(folder, store))
    assert (report.found, report.committed) == (6, 2)
    assert report.rejected == {"changed": 3, "unreadable": 1}
    listed = [json.loads(line) for line in report.listing.read_text().splitlines()]
    assert [(line["id"], line["row"], line["reason"]) for line in listed] == [
        ("r-0001", 1, "changed"),
        ("r-0002", 2, "changed"),
        ("r-0003", 3, "unreadable"),
        ("r-0004", 4, "changed"),
    ]
    assert_holds(store, {0: states[0], 5: states[5]})


def test_what_was_rejected_is_remembered(tmp_path: Path) -> None:
    folder, store = tmp_path / "x", tmp_path / "store"
    states = fill(folder, 12)
    bad = states[0].copy()
    bad[2] = 0
    write(folder / "r-0000.safetensors", bad)
    with pytest.raises(Cut):
        import_folder(request(folder, store, threads=1), cutting(2))  # the heads, then four of the samples
    report = import_folder(request(folder, store))
    assert (report.kept, report.committed, report.rejected) == (3, 11, {"nonzero_rows": 1})
    assert len(report.listing.read_text().splitlines()) == 1
    assert_holds(store, dict(list(enumerate(states))[1:]))


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    folder, store = tmp_path / "x", tmp_path / "store"
    states = fill(folder, 3)
    inside, go = threading.Event(), threading.Event()

    def hold(_: ImportReport) -> None:
        inside.set()
        assert go.wait(300)

    other = threading.Thread(target=import_folder, args=(request(folder, store), hold))
    other.start()
    try:
        assert inside.wait(300)
        with pytest.raises(RunError) as caught:
            import_folder(request(folder, store))
        assert caught.value.kind == "job_locked"
    finally:
        go.set()
        other.join(300)
    assert_holds(store, dict(enumerate(states)))


def test_an_import_into_another_ones_store_is_refused(tmp_path: Path) -> None:
    folder, store = tmp_path / "x", tmp_path / "store"
    states = fill(folder, 6)
    fill(tmp_path / "y", 6)
    with pytest.raises(Cut):
        import_folder(request(folder, store), cutting(2))
    for other, message in (
        (request(tmp_path / "y", store), "another import into .* was begun: its folder is"),
        (request(folder, store, layers=(2, 4, 8)), "another import into .* was begun: its states is"),
        (request(folder, store, roots={"a": store.with_name("store.a")}), "begun with root b"),
    ):
        with pytest.raises(RunError, match=message) as caught:
            import_folder(other)
        assert caught.value.kind == "import_refused"
    report = import_folder(request(folder, store))  # all was there, but for the last word
    assert (report.kept, report.committed) == (6, 6)
    assert_holds(store, dict(enumerate(states)))


def test_a_store_that_was_taken_away_is_made_anew(tmp_path: Path) -> None:
    folder, store = tmp_path / "x", tmp_path / "store"
    states = fill(folder, 6)
    with pytest.raises(Cut):
        import_folder(request(folder, store), cutting(2))
    for path in (store, store.with_name("store.a"), store.with_name("store.b")):
        shutil.rmtree(path)
    write(folder / "r-0001.safetensors", states[0], 1)
    report = import_folder(request(folder, store))
    assert (report.kept, report.committed, report.rejected) == (0, 6, {})
    assert_holds(store, {**dict(enumerate(states)), 1: states[0]})


def test_a_strange_store_beside_a_journal_is_left_alone(tmp_path: Path) -> None:
    folder, store = tmp_path / "x", tmp_path / "store"
    fill(folder, 3)
    with pytest.raises(Cut):
        import_folder(request(folder, store), cutting(1))
    with Journal(journal_path(store)) as journal:
        journal.reach("heads")
    store.mkdir()
    (store / "mine").touch()
    with pytest.raises(RunError, match="did not make it") as caught:
        import_folder(request(folder, store))
    assert caught.value.kind == "import_refused"
    assert [path.name for path in store.iterdir()] == ["mine"]


def test_what_is_no_journal_is_told(tmp_path: Path) -> None:
    fill(tmp_path / "x", 1)
    journal_path(tmp_path / "store").write_bytes(b"something else, longer than a header of SQLite's, that is 100 bytes" * 9)
    with pytest.raises(RunError, match="is no journal of an import") as caught:
        import_folder(request(tmp_path / "x", tmp_path / "store"))
    assert caught.value.kind == "import_refused"


def test_a_full_root_stops_the_import_and_room_lets_it_go_on(tmp_path: Path, small_disk: Path) -> None:
    folder, store = tmp_path / "x", tmp_path / "store"
    states = fill(folder, 8, tokens=5000)  # 640 KB each
    roots = {"a": tmp_path / "a", "small": small_disk}
    with pytest.raises(RunError) as caught:
        import_folder(request(folder, store, roots=roots, threads=1))
    assert caught.value.kind == "roots_full"
    assert_holds(store, dict(list(enumerate(states))[:3]))  # one of them on the small disk, which had no room for another
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    report = import_folder(request(folder, store, roots=roots))
    assert (report.kept, report.committed, report.rejected) == (3, 8, {})
    assert_holds(store, dict(enumerate(states)))


def test_a_full_disk_under_the_store_stops_it_as_well(tmp_path: Path, full_disk: Path) -> None:
    folder, store = tmp_path / "x", full_disk / "store"
    states = fill(folder, 3)
    roots = {"a": tmp_path / "a"}
    with pytest.raises(RunError) as caught:
        import_folder(request(folder, store, roots=roots))
    assert caught.value.kind == "store_unwritable"
    (full_disk / "filler").unlink()
    assert import_folder(request(folder, store, roots=roots)).committed == 3
    assert_holds(store, dict(enumerate(states)))


def test_names_of_all_kinds(tmp_path: Path) -> None:
    """Dots in folders and names, a name that is no UTF-8, a number that is no row."""
    folder, store = tmp_path / "x", tmp_path / "store"
    states = fill(tmp_path / "y", 1)[0]
    names = [b"v1.0/r-1.safetensors", b"v1.0/r-1.5.safetensors", b"a\xffb.safetensors", b"r-" + b"9" * 40 + b".safetensors"]
    for name in names:
        path = folder / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, states)
    report = import_folder(request(folder, store))
    assert (report.committed, report.rejected) == (4, {})
    assert sorted(hsx.open(store).sample_id(index) for index in range(4)) == sorted(
        ["v1.0/r-1", "v1.0/r-1.5", "a\\udcffb", "r-" + "9" * 40]
    )
    (entry,) = open_folder_entries(tmp_path / "y" / "r-0000.safetensors", "data_" + "9" * 40 + ".ckpt")
    assert entry.row == 2**63 - 1


def open_folder_entries(source: Path, name: str) -> list[Any]:
    """What a SpecForge folder of one file of that name has."""
    folder = source.parent.with_name("specforge")
    folder.mkdir()
    shutil.copy(source, folder / name)
    return list(open_source("specforge", folder).entries())


def test_links_are_followed_and_every_folder_is_read_once(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "x", tmp_path / "elsewhere"
    states = fill(elsewhere, 3)
    (folder / "own").mkdir(parents=True)
    write(folder / "own" / "r-0007.safetensors", states[0], 7)
    (folder / "a-loop").symlink_to(folder)
    (folder / "again").symlink_to(folder / "own")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "linked-2").symlink_to(elsewhere)
    (folder / "nowhere.safetensors").symlink_to(tmp_path / "nothing")
    (folder / "one.safetensors").symlink_to(elsewhere / "r-0000.safetensors")
    report = import_folder(request(folder, tmp_path / "store"))
    ids = {hsx.open(tmp_path / "store").sample_id(index) for index in range(report.committed)}
    assert ids == {"own/r-0007", "linked/r-0000", "linked/r-0001", "linked/r-0002", "one"}
    assert report.rejected == {"unreadable": 1}


def test_a_folder_without_its_states_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa

    table = pa.table({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]})
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with pytest.raises(RunError, match="has no folder hidden_states") as caught:
        list(open_source("speculators", tmp_path).entries())
    assert caught.value.kind == "import_refused"


def test_very_many_files_take_no_more_memory_than_a_few(tmp_path: Path) -> None:
    """Links to one file; what Python holds while they are listed, in order."""
    folder = tmp_path / "x"
    folder.mkdir()
    (tmp_path / "one").touch()
    count = 20_000
    for number in range(count):
        os.link(tmp_path / "one", folder / f"a-long-name-as-servers-give-them-{number:010}.safetensors")
    program = textwrap.dedent(
        """
        import os, sys, tracemalloc
        from pathlib import Path
        from hsx.ingest.files import files_below
        from hsx.ingest.journal import Journal

        tracemalloc.start()
        with Journal(Path(sys.argv[2])) as journal:
            found = files_below(Path(sys.argv[1]), (".safetensors",))
            journal.list_files(((-1, os.fsencode(path.name)) for path in found), ())
            print(tracemalloc.get_traced_memory()[1])
        """
    )
    # In a process of its own: names that other modules have interned are in a table that may grow at any time.
    said = subprocess.run(
        [sys.executable, "-c", program, folder, tmp_path / "journal"], capture_output=True, text=True, check=True, timeout=300
    )
    with Journal(tmp_path / "journal") as journal:
        assert journal.count_files() == count
        first = [os.fsdecode(item.path)[-18:] for item in journal.unread()[:2]]
        assert first == ["000000.safetensors", "000001.safetensors"]
    assert int(said.stdout) < 1 << 20, said.stdout
