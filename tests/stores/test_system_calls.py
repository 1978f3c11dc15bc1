"""What a shard costs in system calls, and in which order: seen by strace, from outside."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

PROGRAM = """
import os
import sys
from pathlib import Path
import numpy as np
from hsx.testing.root_contract import as_dump, make
from hsx.testing.stores import random_states
folder = Path(sys.argv[1])
made = make(folder, 128, **eval(sys.argv[2]))
payload = as_dump(random_states(np.random.default_rng(0), 320, 3, 128), folder)
made.root.write(payload)  # finds out about O_DIRECT, and makes the scratch memory
os.write(2, b"now")
made.root.write(payload)
made.root.sync()
os.write(2, b"end")
"""
CALLS = "open,openat,fallocate,write,pwrite64,pwritev,pwritev2,sendfile,ftruncate,fdatasync,fsync,rename,renameat,renameat2"


def calls_of_one_write(folder: Path, how: str) -> list[str]:
    """Names of the system calls of a write and a sync, in order; `open` only where a file is opened for writing."""
    log = folder / "strace"
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={CALLS}", sys.executable, "-c", PROGRAM]
    subprocess.run([*command, str(folder), how], check=True, capture_output=True, timeout=600)
    text = log.read_text()
    between = text[text.index('"now') : text.index('"end')].splitlines()[1:-1]
    found = [match[1] for line in between if (match := re.match(r"\d+ +(\w+)\(", line)) and "O_RDONLY" not in line]
    # The C library chooses among calls that do the same.
    same = {"openat": "open", "renameat": "rename", "renameat2": "rename", "pwritev2": "pwritev"}
    return [same.get(name, name) for name in found]


def test_a_shard_is_preallocated_written_synced_and_named(tmp_path: Path) -> None:
    if "O_DIRECT" not in direct_of(tmp_path):
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    calls = calls_of_one_write(tmp_path, "{}")
    # Five inner chunks and the tail go to the disk in one call, from the dump's own pages.
    assert calls == ["open", "fallocate", "pwritev", "fdatasync", "rename", "fsync"]


def direct_of(folder: Path) -> str:
    """Whether O_DIRECT is there."""
    program = "import os, sys; os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_DIRECT); print('O_DIRECT')"
    done = subprocess.run([sys.executable, "-c", program, folder / "probe"], check=False, capture_output=True, text=True)
    return done.stdout


def test_without_o_direct_rows_are_sent_within_the_kernel(tmp_path: Path) -> None:
    calls = calls_of_one_write(tmp_path, "{'direct': False}")
    # What is between the rows of two chunks: checksum and zeros. The last goes with the tail.
    assert calls == ["open", "fallocate", *["sendfile", "pwritev"] * 5, "fdatasync", "rename", "fsync"]


def test_relaxed_durability_syncs_nothing(tmp_path: Path) -> None:
    calls = calls_of_one_write(tmp_path, "{'durable': False}")
    assert (calls[0], calls[1], calls[-1]) == ("open", "fallocate", "rename")
    assert "fdatasync" not in calls
    assert "fsync" not in calls


def test_a_compressed_shard_is_cut_to_its_size(tmp_path: Path) -> None:
    calls = calls_of_one_write(tmp_path, "{'codec': 'zstd'}")
    assert calls == ["open", "fallocate", *["pwritev"] * 5, "ftruncate", "fdatasync", "rename", "fsync"]
