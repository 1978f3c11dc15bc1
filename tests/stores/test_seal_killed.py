"""Sealing, and taking the seal away, killed at a system call: the store is sealed or it is not, and the same call goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.stores.group import open_store
from hsx.stores.seal import SealedArrays, manifest_faults, remove_seal, write_seal
from hsx.testing.stores import BuiltStore, build_store, random_states
from hsx.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
KILLED = -9
PROGRAM = """
import sys
from hsx.stores.group import open_store
from hsx.stores.seal import SealedArrays, remove_seal, write_seal

info = open_store(sys.argv[1])
if sys.argv[2] == "seal":
    arrays = SealedArrays.empty(info)
    for row in sys.argv[3:]:
        index, root, crc = row.split("/")
        arrays.put(int(index), root, int(crc))
    write_seal(info, arrays, {"at": "now", "committed": len(sys.argv) - 3})
else:
    remove_seal(info)
"""


def killed(built: BuiltStore, what: str, call: str, number: int) -> None:
    """Seals (or the reverse) in a process that is killed when it makes a system call for the `number`-th time."""
    if shutil.which("strace") is None:
        assert os.environ.get("CI") != "true", "CI runs every test: with strace"
        pytest.skip("needs strace")
    inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={number}"]
    rows = [f"{row.index}/{row.root}/{row.crc32c}" for row in built.rows]
    ended = subprocess.run([*inject, sys.executable, "-c", PROGRAM, str(built.info.path), what, *rows])
    assert ended.returncode == KILLED


def seal(built: BuiltStore) -> None:
    arrays = SealedArrays.empty(built.info)
    for row in built.rows:
        arrays.put(row.index, row.root, row.crc32c)
    write_seal(open_store(built.info.path), arrays, {"at": "now", "committed": len(built.rows)})


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    rng = np.random.default_rng(5)
    return build_store(tmp_path, [random_states(rng, tokens, 3, 16) for tokens in (70, 5, 64)])


@pytest.mark.parametrize(
    ("call", "number"), [("mkdir", 2), ("fsync", 3), ("rename", 1), ("rename", 7), ("rename", 9), ("rename", 11)]
)
def test_sealing(built: BuiltStore, call: str, number: int) -> None:
    killed(built, "seal", call, number)
    info = open_store(built.info.path)
    assert info == built.info
    assert verify(info.path, built.rows).ok
    seal(built)
    assert manifest_faults(open_store(info.path)) == []
    assert verify(info.path).ok


@pytest.mark.parametrize(("call", "number"), [("rename", 1), ("fsync", 2), ("unlink", 1), ("rmdir", 2)])
def test_taking_the_seal_away(built: BuiltStore, call: str, number: int) -> None:
    before = sorted(path.name for path in built.info.path.iterdir())
    seal(built)
    killed(built, "undo", call, number)
    assert (open_store(built.info.path).sealed is None) == (call != "rename")
    assert verify(built.info.path, built.rows).ok
    remove_seal(open_store(built.info.path))
    assert sorted(path.name for path in built.info.path.iterdir()) == before
    assert open_store(built.info.path) == built.info
