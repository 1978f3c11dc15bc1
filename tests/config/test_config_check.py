"""Cross-checks of the job file: each finding, and that a good file has none but those of this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from hsx.commands.job import examine
from hsx.config_check import Finding, check
from hsx.config_load import load
from hsx.core.amounts import in_words_and_bytes
from hsx.core.spec import ModelShape
from hsx.disks import Disks
from hsx.prepare import prepare
from hsx.testing.jobs import write_job

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = ModelShape(hidden_size=64, layers=4, vocab_size=512, context_length=4096)
# The dump of 4088 tokens, on whole pages: a page of header, and per token 3 states of 64 bf16 values and an int32 id.
LARGEST_DUMP = 4096 + -(-4088 * (3 * 64 * 2 + 4) // 4096) * 4096


def mounts(*entries: tuple[Path, str], options: str = "rw") -> Disks:
    """Mounted file systems as the kernel lists them: a disk at /, and others on top."""
    lines = ["1 0 8:1 / / rw - ext4 /dev/sda1 rw"]
    lines += [f"{n} 1 0:{n} / {point} {options} - {kind} none {options}" for n, (point, kind) in enumerate(entries, 2)]
    return Disks("\n".join(lines))


def findings(folder: Path, changes: dict[str, Any] | None = None, disks: Disks | None = None, **known: Any) -> list[Finding]:
    loaded = load(write_job(folder, changes))
    given = {"shape": SHAPE, "longest": None, "open_files": 1 << 20, **known}
    return check(loaded, given["shape"], given["longest"], disks or mounts((folder / "dumps", "tmpfs")), given["open_files"])


def only(found: list[Finding], key: str) -> Finding:
    (finding,) = [finding for finding in found if finding.key == key]
    return finding


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dumps").mkdir()
    return tmp_path


def test_a_good_job_has_no_findings(folder: Path) -> None:
    assert findings(folder) == []


def test_errors_come_first(folder: Path) -> None:
    found = findings(folder, {"capture": {"layers": [9]}, "status": {"host": "0.0.0.0"}})
    assert [finding.level for finding in found] == ["error", "warning"]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "is empty"),
        ([3, 1], "strictly rising"),
        ([1, 1], "strictly rising"),
        ([-1, 1], "has -1; expected 0 to 3 for a model of 4 layers"),
        ([1, 4], "has 4; expected 0 to 3"),
    ],
)
def test_a_capture_spec_that_the_model_cannot_give(folder: Path, layers: list[int], words: str) -> None:
    finding = only(findings(folder, {"capture": {"layers": layers}}), "capture.layers")
    assert finding.level == "error"
    assert words in finding.message
    assert "capture.layers" not in finding.message  # the key is named beside it


@pytest.mark.parametrize(("layers", "count"), [([2, 1], 1), ([-1], 1), ([0, 60], 0)])
def test_without_the_model_a_spec_is_judged_as_far_as_it_can_be(folder: Path, layers: list[int], count: int) -> None:
    found = findings(folder, {"capture": {"layers": layers}}, shape=None)
    assert len([finding for finding in found if finding.key == "capture.layers"]) == count


@pytest.mark.parametrize(("budget", "fits"), [(LARGEST_DUMP, True), (LARGEST_DUMP - 1, False)])
def test_a_staging_budget_smaller_than_the_largest_sample(folder: Path, budget: int, fits: bool) -> None:
    found = findings(folder, {"staging": {"max_bytes": f"{budget}B"}})
    assert found == [] if fits else only(found, "staging.max_bytes").level == "error"
    if not fits:
        assert f"expected at least {in_words_and_bytes(LARGEST_DUMP)}, the dump of a sample of 4088 tokens" in found[0].message


def test_the_longest_sample_counts_once_it_is_known(folder: Path) -> None:
    assert findings(folder, {"staging": {"max_bytes": f"{LARGEST_DUMP - 1}B"}}, longest=4000) == []


@pytest.mark.parametrize(("tokens", "level"), [(4088, None), (4089, "warning"), (4096, "warning"), (4097, "error")])
def test_samples_longer_than_the_context(folder: Path, tokens: int, level: str | None) -> None:
    found = findings(folder, {"dataset": {"max_tokens": tokens}, "staging": {"max_bytes": "1GiB"}})
    assert [finding.level for finding in found if finding.key == "dataset.max_tokens"] == ([level] if level else [])


def test_a_token_budget_below_the_longest_sample(folder: Path) -> None:
    finding = only(findings(folder, {"pipeline": {"max_tokens_in_flight": 100}}), "pipeline.max_tokens_in_flight")
    assert (finding.level, finding.message) == ("warning", "is 100; a sample of 4088 tokens will run alone")


def test_a_dump_directory_on_a_disk(folder: Path) -> None:
    finding = only(findings(folder, disks=mounts()), "staging.dump_dir")
    assert finding.level == "warning"
    assert "is on ext4; expected a tmpfs" in finding.message


def test_a_dump_directory_that_is_not_there(folder: Path) -> None:
    (folder / "dumps").rmdir()
    finding = only(findings(folder, disks=mounts()), "staging.dump_dir")
    words = f"{folder}/dumps does not exist and would be made on ext4, in {folder}; expected a tmpfs"
    assert (finding.level, finding.message.startswith(words)) == ("warning", True)
    assert findings(folder, {"job": {"state_dir": "/state"}}, mounts((folder, "tmpfs")))[0].key != "staging.dump_dir"


def test_a_tmpfs_smaller_than_the_budget(folder: Path) -> None:
    finding = only(findings(folder, {"staging": {"max_bytes": "900TiB"}}), "staging.max_bytes")
    assert finding.level == "warning"
    assert "the file system of staging.dump_dir has" in finding.message


def test_a_dump_directory_that_is_smaller_than_the_largest_dump(folder: Path, small_disk: Path) -> None:
    """Nothing but the true longest sample decides; the budget alone would be a warning."""
    staging = {"staging": {"dump_dir": str(small_disk), "max_bytes": "4MiB"}}
    disks = mounts((small_disk, "tmpfs"))
    finding = only(findings(folder, staging, disks), "staging.dump_dir")
    assert finding.level == "error"
    assert f"a file system of 1.05 MB; expected at least {in_words_and_bytes(LARGEST_DUMP)}" in finding.message
    (warning,) = findings(folder, staging, disks, longest=100)
    assert (warning.level, warning.key) == ("warning", "staging.max_bytes")


@pytest.mark.parametrize(("limit", "levels"), [(-1, []), (132, []), (131, ["warning"]), (33, ["warning"]), (32, ["error"])])
def test_too_few_open_files_for_the_concurrency(folder: Path, limit: int, levels: list[str]) -> None:
    found = findings(folder, {"pipeline": {"concurrency": 32}}, open_files=limit)
    assert [finding.level for finding in found] == levels
    assert all(f"may open {limit} files" in finding.message and "about 132" in finding.message for finding in found)


def test_a_model_that_cannot_be_read_is_told_once(folder: Path) -> None:
    _, found = examine(load(write_job(folder, {"model": {"path": "none"}})))
    finding = only(found, "model.path")
    assert finding.level == "error"
    assert finding.message == f"{folder}/none does not exist; expected a local folder; hub names are not downloaded"


def test_the_longest_sample_is_taken_from_the_ledger(folder: Path) -> None:
    """A budget that the context's longest dump would pass, and the dataset's does not, is fine once the dataset was read."""
    loaded = load(write_job(folder, {"staging": {"max_bytes": "64KiB"}}))
    assert any(finding.key == "staging.max_bytes" and finding.level == "error" for finding in examine(loaded)[1])
    prepare(loaded, lambda _rows, _tokens: None)
    assert not any(finding.key == "staging.max_bytes" for finding in examine(loaded)[1])


def roots(*pairs: tuple[str, str], reserve: str = "0B") -> dict[str, Any]:
    return {"roots": [{"name": name, "path": path, "reserve": reserve} for name, path in pairs]}


def test_two_roots_on_one_device(folder: Path) -> None:
    finding = only(findings(folder, roots(("a", "r/a"), ("b", "r/b"))), "roots")
    assert finding.level == "warning"
    assert f"a ({folder}/r/a), b ({folder}/r/b) are on one device" in finding.message


def test_two_roots_of_one_name(folder: Path) -> None:
    found = [finding for finding in findings(folder, roots(("a", "r/a"), ("a", "r/b"))) if finding.level == "error"]
    assert [finding.message for finding in found] == ["2 roots are named 'a'; expected names to differ"]


@pytest.mark.parametrize(
    ("paths", "key", "words"),
    [
        (("r", "r"), "roots[0].path", "is also roots[1].path"),
        (("r", "r/inner"), "roots[1].path", "is inside roots[0].path"),
        (("r/inner", "r"), "roots[0].path", "is inside roots[1].path"),
        (("link", "target"), "roots[0].path", "is also roots[1].path"),
        (("store.zarr", "r"), "job.store", "is also roots[0].path"),
        (("store.zarr/inner", "r"), "roots[0].path", "is inside job.store"),
        ((".", "/r"), "job.store", "is inside roots[0].path"),
        (("dumps/inner", "r"), "roots[0].path", "is inside staging.dump_dir"),
    ],
)
def test_places_that_lie_in_each_other(folder: Path, paths: tuple[str, str], key: str, words: str) -> None:
    (folder / "target").mkdir()
    (folder / "link").symlink_to("target")
    found = [f for f in findings(folder, roots(("a", paths[0]), ("b", paths[1]))) if f.level == "error"]
    assert any(finding.key == key and words in finding.message for finding in found)


def test_a_reserve_as_large_as_the_disk(folder: Path) -> None:
    finding = only(findings(folder, roots(("a", "r"), reserve="900TiB")), "roots[0].reserve")
    assert finding.level == "error"
    assert "the whole file system has" in finding.message


def test_a_root_that_a_reboot_loses(folder: Path) -> None:
    disks = mounts((folder / "dumps", "tmpfs"), (folder / "root-a", "tmpfs"))
    assert "is lost at a reboot" in only(findings(folder, disks=disks), "roots[0].path").message


@pytest.mark.parametrize(("kind", "words"), [("nfs4", "expected a local file system"), ("tmpfs", "a reboot loses the ledger")])
def test_a_state_dir_that_cannot_be_trusted(folder: Path, kind: str, words: str) -> None:
    (folder / "state").mkdir()
    disks = mounts((folder / "dumps", "tmpfs"), (folder / "state", kind))
    finding = only(findings(folder, {"job": {"state_dir": "state"}}, disks), "job.state_dir")
    assert finding.level == "warning"
    assert words in finding.message


def test_a_state_dir_inside_the_store(folder: Path) -> None:
    finding = only(findings(folder, {"job": {"state_dir": "store.zarr/state"}}), "job.state_dir")
    assert (finding.level, "is inside job.store" in finding.message) == ("error", True)


def test_a_place_that_cannot_be_made(folder: Path) -> None:
    (folder / "file").write_text("", encoding="utf-8")
    finding = only(findings(folder, {"job": {"store": "file/store.zarr", "state_dir": "state"}}), "job.store")
    assert finding.level == "error"
    assert finding.message.endswith("is not a folder")


def test_a_root_that_is_not_there(folder: Path) -> None:
    loaded = load(write_job(folder))
    (folder / "root-a").rmdir()
    finding = only(check(loaded, SHAPE, None, mounts((folder / "dumps", "tmpfs"))), "roots[0].path")
    expected = f"{folder}/root-a does not exist; mount its disk, or make the folder on that disk"
    assert (finding.level, finding.message) == ("error", expected)


def test_a_missing_root_may_be_gone_without_but_not_all_of_them(folder: Path) -> None:
    (folder / "root-b").mkdir()
    both = {"roots": [{"name": name, "path": f"root-{name}", "reserve": "0B"} for name in "ab"]}
    loaded = load(write_job(folder, {**both, "storage": {"on_missing_root": "go_on"}}))
    (folder / "root-a").rmdir()
    tmpfs = mounts((folder / "dumps", "tmpfs"))
    assert only(check(loaded, SHAPE, None, tmpfs), "roots[0].path").level == "warning"
    (folder / "root-b").rmdir()
    assert only(check(loaded, SHAPE, None, tmpfs), "roots[1].path").level == "error"


def test_a_place_on_a_read_only_file_system(folder: Path) -> None:
    (folder / "ro").mkdir()
    lines = f"1 0 8:1 / / rw - ext4 a rw\n2 1 0:1 / {folder}/dumps rw - tmpfs b rw\n3 1 8:2 / {folder}/ro ro - ext4 c rw"
    finding = only(findings(folder, roots(("a", "ro/root")), Disks(lines)), "roots[0].path")
    assert (finding.level, "is on a read-only file system" in finding.message) == ("error", True)


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"dataset": {"path": "none.jsonl"}}, "dataset.path", "does not exist"),
        ({"dataset": {"path": "root-a"}}, "dataset.path", "is a folder without a data file; expected files ending in .jsonl"),
        ({"dataset": {"path": "rows.jso*.gz"}}, "dataset.path", "no file is called so"),
        ({"dataset": {"columns": {"ids": "x"}}}, "dataset.columns", "has the key 'ids'; expected one of id, input_ids"),
        ({"dataset": {"columns": {"id": ""}}}, "dataset.columns", "id is ''; expected the name of a field"),
        ({"dataset": {"text_markers": ["a"]}}, "dataset.text_markers", "expected two texts"),
        ({"dataset": {"chat_template": "none.jinja"}}, "dataset.chat_template", "is not a file"),
        ({"engine": {"ownership": "spawn", "kind": "reference", "python": "no/python"}}, "engine.python", "does not exist"),
        ({"engine": {"ownership": "spawn", "kind": "reference", "python": "rows.jsonl"}}, "engine.python", "does not exist"),
        (
            {"engine": {"ownership": "spawn", "kind": "reference", "python": "./rows.jsonl"}},
            "engine.python",
            "is not executable",
        ),
        ({"status": {"port": 30000}}, "status.port", "as is engine.port on the same host"),
        ({"watchdog": {"backoff_first_s": 9, "backoff_longest_s": 3}}, "watchdog.backoff_first_s", "expected at most"),
    ],
)
def test_other_errors(folder: Path, changes: dict[str, Any], key: str, words: str) -> None:
    finding = only(findings(folder, changes), key)
    assert finding.level == "error"
    assert words in finding.message


def test_the_interpreter_of_a_spawned_server_may_be_anywhere(folder: Path) -> None:
    for python in (sys.executable, "sh", ""):
        assert findings(folder, {"engine": {"ownership": "spawn", "kind": "reference", "python": python}}) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--disable-radix-cache is missing"),
        (["--disable-radix-cache", "--pp-size", "2"], "--pp-size is 2; expected 1"),
        (["--disable-radix-cache", "--speculative-algorithm", "EAGLE"], "--speculative-algorithm is given; remove it"),
    ],
)
def test_server_arguments_under_which_capture_would_be_wrong(folder: Path, args: list[str], words: str) -> None:
    finding = only(findings(folder, {"engine": {"ownership": "spawn", "args": args}}), "engine.args")
    assert finding.level == "error"
    assert words in finding.message


def test_good_server_arguments(folder: Path) -> None:
    assert findings(folder, {"engine": {"ownership": "spawn", "args": ["--disable-radix-cache", "--tp-size", "8"]}}) == []


def test_settings_of_a_spawned_server_have_no_use_for_an_external_one(folder: Path) -> None:
    found = findings(folder, {"engine": {"args": ["--x"], "env": {"A": "b"}, "python": "/nowhere"}})
    assert {(finding.level, finding.key) for finding in found} == {
        ("warning", f"engine.{key}") for key in ("args", "env", "python")
    }


@pytest.mark.parametrize(
    ("host", "warned"), [("127.0.0.1", 0), ("::1", 0), ("localhost", 0), ("0.0.0.0", 1), ("host.example", 1)]
)
def test_a_status_endpoint_that_others_reach(folder: Path, host: str, warned: int) -> None:
    assert [f.key for f in findings(folder, {"status": {"host": host}})] == ["status.host"] * warned


def test_a_status_endpoint_that_is_off_is_not_judged(folder: Path) -> None:
    assert findings(folder, {"status": {"host": "0.0.0.0", "port": 30000, "enabled": False}}) == []
