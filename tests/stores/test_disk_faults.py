"""Full disks, killed writers: what is left behind, and what is reported."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.errors import RunError
from hsx.stores.attach import attach_roots
from hsx.stores.group import create_store
from hsx.stores.shard_reader import ShardFile
from hsx.testing.stores import payload, random_states

if TYPE_CHECKING:
    from pathlib import Path

STATES = random_states(np.random.default_rng(0), 640, 3, 128)  # 480 KiB
LAYOUT = StoreLayout(8, 640, 3, 128)
SPEC = CaptureSpec((1, 2), "post_norm")


def test_full_disk_is_found_before_the_first_byte(tmp_path: Path, small_disk: Path) -> None:
    _, (root,) = attach_roots(create_store(tmp_path / "store", LAYOUT, SPEC, {}), {"small": small_disk})
    assert root.free() < 2 * LAYOUT.file_bytes(640) + (1 << 16)
    root.write(payload(Marker("deadbeef", 0, 1, 640), STATES))
    before = root.free()
    with pytest.raises(RunError, match=r"root small: no space for .*c\.1\.0\.0\.0\.hsx1-deadbeef-1-1-640\.partial") as error:
        root.write(payload(Marker("deadbeef", 1, 1, 640), STATES))
    assert error.value.kind == "roots_full"
    assert root.free() == before
    assert sorted(path.name for path in root.folder.iterdir()) == ["c.0.0.0.0", "hsx-root.json", "zarr.json"]
    with ShardFile(root.folder / "c.0.0.0.0", LAYOUT, 640) as shard:
        assert np.array_equal(shard.read(), STATES)


def test_read_only_disk_is_unusable(tmp_path: Path, small_disk: Path) -> None:
    _, (root,) = attach_roots(create_store(tmp_path / "store", LAYOUT, SPEC, {}), {"small": small_disk})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(RunError, match="EROFS") as error:
        root.write(payload(Marker("deadbeef", 0, 1, 640), STATES))
    assert error.value.kind == "root_unusable"


def test_file_size_limit_is_a_short_write_and_then_an_error(tmp_path: Path) -> None:
    """With SIGXFSZ ignored, the kernel writes what fits and then fails: nothing may be left, and nothing claimed."""
    (tmp_path / "a").mkdir()
    attach_roots(create_store(tmp_path / "store", LAYOUT, SPEC, {}), {"a": tmp_path / "a"})
    program = """
import resource, signal, sys
import numpy as np
from pathlib import Path
from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.stores.group import open_store
from hsx.stores.attach import attach_roots
from hsx.testing.stores import payload
info = open_store(sys.argv[1])
_, (root,) = attach_roots(info, {"a": Path(sys.argv[2])})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    root.write(payload(Marker("deadbeef", 0, 1, 640), np.ones((640, 3, 128), np.uint16)))
except RunError as error:
    print(error.kind, error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "store", tmp_path / "a"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("root_unusable root a: ")
    assert "EFBIG" in done.stdout
    assert list((tmp_path / "a").glob("*/c.*")) == []


def test_killed_writer_leaves_only_a_partial_file(tmp_path: Path) -> None:
    """Four threads write the same shards over and over; the kill comes while a partial file exists or has just been renamed."""
    (tmp_path / "a").mkdir()
    _, (root,) = attach_roots(create_store(tmp_path / "store", LAYOUT, SPEC, {}), {"a": tmp_path / "a"})
    program = """
import sys, threading
from pathlib import Path
import numpy as np
from hsx.core.marker import Marker
from hsx.stores.group import open_store
from hsx.stores.attach import attach_roots
from hsx.testing.stores import payload
info = open_store(sys.argv[1])
_, (root,) = attach_roots(info, {"a": Path(sys.argv[2])})
states = np.ones((640, 3, 128), np.uint16)
def write_for_ever(index):
    attempt = 0
    while True:
        attempt += 1
        root.write(payload(Marker("deadbeef", index, attempt, 640), states))
for index in range(4):
    threading.Thread(target=write_for_ever, args=(index,), daemon=True).start()
print("writing", flush=True)
threading.Event().wait()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "store", tmp_path / "a"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "writing\n"
        while not list(root.folder.glob("*.partial")):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    partial = {path.name for path in root.folder.glob("*.partial")}
    assert root.sweep() == len(partial)
    assert root.sweep() == 0
    left = {path.name for path in root.folder.iterdir()} - {"zarr.json", "hsx-root.json"}
    assert left <= {f"c.{index}.0.0.0" for index in range(4)}
    for name in left:
        with ShardFile(root.folder / name, LAYOUT, 640) as shard:
            assert bool((shard.read() == 1).all())


def test_second_attempt_replaces_the_first(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    _, (root,) = attach_roots(create_store(tmp_path / "store", LAYOUT, SPEC, {}), {"a": tmp_path / "a"})
    root.write(payload(Marker("deadbeef", 3, 1, 640), np.ones_like(STATES)))
    root.write(payload(Marker("deadbeef", 3, 2, 640), STATES))
    root.sync()
    with ShardFile(root.folder / "c.3.0.0.0", LAYOUT, 640) as shard:
        assert np.array_equal(shard.read(), STATES)
    assert (root.folder / "c.3.0.0.0").stat().st_size == LAYOUT.file_bytes(640)


@pytest.mark.parametrize("call", ["fallocate", "pwritev2", "fdatasync", "rename"])
def test_io_error_leaves_nothing_and_is_not_tried_again(tmp_path: Path, call: str) -> None:
    """The kernel's EIO, put into the first such system call on a shard by strace; a second one would succeed."""
    if shutil.which("strace") is None:
        assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount and strace"
        pytest.skip("needs strace")
    (tmp_path / "a").mkdir()
    attach_roots(create_store(tmp_path / "store", LAYOUT, SPEC, {}), {"a": tmp_path / "a"})
    program = """
import sys
from pathlib import Path
import numpy as np
from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.stores.group import open_store
from hsx.stores.attach import attach_roots
from hsx.testing.stores import payload
_, (root,) = attach_roots(open_store(sys.argv[1]), {"a": Path(sys.argv[2])})
try:
    root.write(payload(Marker("deadbeef", 0, 1, 640), np.ones((640, 3, 128), np.uint16)))
except RunError as error:
    print(error.kind, error.message)
"""
    inject = ["strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", f"inject={call}:error=EIO:when=1"]
    command = [*inject, sys.executable, "-B", "-c", program, str(tmp_path / "store"), str(tmp_path / "a")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("root_unusable root a: ")
    assert "EIO" in done.stdout
    assert list((tmp_path / "a").glob("*/c.*")) == []
    assert (tmp_path / "trace").read_text().count(f"{call}(") == 1


@pytest.mark.parametrize("call", ["openat", "pwritev2"])
def test_file_system_without_o_direct_gets_ordinary_writes(tmp_path: Path, call: str) -> None:
    """EINVAL, put in by strace: some such file systems refuse to open, some to write, and a recent tmpfs takes both."""
    if shutil.which("strace") is None:
        assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount and strace"
        pytest.skip("needs strace")
    (tmp_path / "a").mkdir()
    _, (root,) = attach_roots(create_store(tmp_path / "store", LAYOUT, SPEC, {}), {"a": tmp_path / "a"})
    program = """
import sys
from pathlib import Path
import numpy as np
from hsx.core.marker import Marker
from hsx.stores.group import open_store
from hsx.stores.attach import attach_roots
from hsx.testing.stores import payload
_, (root,) = attach_roots(open_store(sys.argv[1]), {"a": Path(sys.argv[2])})
states = np.arange(640 * 3 * 128, dtype=np.uint32).astype(np.uint16).reshape(640, 3, 128)
print(root.write(payload(Marker("deadbeef", 0, 1, 640), states)).nbytes)
"""
    partial = root.folder / "c.0.0.0.0.hsx1-deadbeef-0-1-640.partial"
    inject = [
        "strace",
        "-f",
        "-qq",
        "-o",
        str(tmp_path / "trace"),
        "-P",
        str(partial),
        "-e",
        f"inject={call}:error=EINVAL:when=1",
    ]
    command = [*inject, sys.executable, "-B", "-c", program, str(tmp_path / "store"), str(tmp_path / "a")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) == LAYOUT.file_bytes(640)
    assert (tmp_path / "trace").read_text().count("EINVAL") == 1
    expected = np.arange(640 * 3 * 128, dtype=np.uint32).astype(np.uint16).reshape(640, 3, 128)
    with ShardFile(root.folder / "c.0.0.0.0", LAYOUT, 640) as shard:
        assert np.array_equal(shard.read(), expected)
