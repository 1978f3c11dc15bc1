"""A process tree in a server's place, which does nothing but be hard to get rid of: for tests of who owns a server.

    python -m hsx.testing.idle_server DUMP_DIR [--stubborn] [--no-record] [--shared] [--exit N] --epoch UUID -- ARGS

It writes its epoch record as `hsx serve` does, and beside it `pids.json`: its own pid, that of a child, that of an
orphan in a session of its own, the arguments after `--`, and the name of a file in /dev/shm, which with `--shared` the orphan
makes and holds once the record is there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from hsx.core.epoch import RECORD_NAME, EpochRecord, to_json
from hsx.engines.leftovers import SHARED
from hsx.engines.process import boot_id, start_ticks

PIDS_NAME: Final = "pids.json"


def record_of(pid: int, epoch: str, port: int = 7) -> EpochRecord:
    """The epoch record of a living process, as if it were a server; by default on a port where nobody listens."""
    return EpochRecord(
        epoch=epoch,
        boot_id=boot_id(),
        pid=pid,
        start_ticks=start_ticks(pid) or 0,
        invocation_id="",
        command=("idle",),
        model="/models/m",
        revision="",
        layers=(1, 3),
        final="post_norm",
        engine="reference",
        engine_version="0",
        plugin_version="0",
        host="127.0.0.1",
        port=port,
    )


def write_record(dump_dir: Path, record: EpochRecord) -> Path:
    """Publishes `server.json` of the record's epoch; returns the epoch's folder."""
    folder = dump_dir / record.epoch
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{RECORD_NAME}.part"
    part.write_text(to_json(record))
    part.rename(folder / RECORD_NAME)
    return folder


def main() -> int:
    """Runs until killed, or SIGTERM."""
    args = argparse.ArgumentParser()
    args.add_argument("dump_dir", type=Path)
    args.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    args.add_argument("--no-record", action="store_true")
    args.add_argument("--shared", action="store_true", help="hold a file in /dev/shm")
    args.add_argument("--exit", type=int, help="end with this status before writing a record")
    args.add_argument("--last-words", default="idle server is up", help="printed to stderr at the start")
    args.add_argument("--epoch", required=True)
    end = sys.argv.index("--")
    options, rest = args.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stderr.write(options.last_words + "\n")
    sys.stderr.flush()
    if options.exit is not None:
        return int(options.exit)
    read, write = os.pipe()
    shared = f"psm_{options.epoch}"
    child = os.fork()
    if child == 0:
        # The grandchild outlives its parent's interest: another session, a parent that does not wait for it.
        orphan = os.fork()
        if orphan == 0:
            os.setsid()
            os.write(write, str(os.getpid()).encode())
            if options.shared:
                while not (options.dump_dir / options.epoch / RECORD_NAME).exists():
                    time.sleep(0.01)
                with (SHARED / shared).open("xb"):
                    _sleep()
        _sleep()
    orphan = int(os.read(read, 20))
    pids = {"epoch": options.epoch, "main": os.getpid(), "child": child, "orphan": orphan, "rest": rest, "shared": shared}
    if not options.no_record:
        folder = options.dump_dir / options.epoch
        folder.mkdir(parents=True)
        (folder / PIDS_NAME).write_text(json.dumps(pids))
        write_record(options.dump_dir, record_of(os.getpid(), options.epoch))
    _sleep()
    return 0


def _sleep() -> None:
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main())
