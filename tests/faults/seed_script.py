"""Extracts hidden states the way it was done before hsx: by predicting the number of the server's next dump.

    python seed_script.py ROWS.jsonl SERVER_URL DUMP_FOLDER OUT_FOLDER

One request at a time, in order; the k-th dump of the server is taken for the k-th sample's, and saved as OUT_FOLDER/<k>.npy.
Started again, it goes on after the last sample that it saved. Kept because it is wrong: see test_seed_story.py.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import numpy as np

from hsx.core.dump import SUFFIX
from hsx.core.marker import Marker
from hsx.dumps.reader import MappedDump

RUN = secrets.token_hex(4)
"""Of its own at each start: a request that was sent before the kill and is sent again makes another dump, as it did there."""


def numbered(folder: Path, number: int) -> np.ndarray:
    """The states in the dump with that number, once it is there: bf16 bits, uint16 [tokens, L, H]."""
    while True:
        for path in folder.glob(f"*{SUFFIX}"):
            with closing(MappedDump(path)) as dump:
                if dump.header.sequence == number:
                    return np.array(dump.states)
        time.sleep(0.02)


def main() -> None:
    """Extracts what is not saved yet."""
    rows, url, folder, out = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    for index, line in enumerate(Path(rows).read_text().splitlines()):
        if (out / f"{index}.npy").exists():
            continue
        ids = json.loads(line)["input_ids"]
        body = {"rid": str(Marker(RUN, index, 1, len(ids))), "input_ids": ids, "sampling_params": {"max_new_tokens": 0}}
        request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300):
            pass
        states = numbered(folder, index + 1)  # the prediction
        partial = out / f"{index}.partial.npy"
        np.save(partial, states)
        partial.rename(out / f"{index}.npy")


if __name__ == "__main__":
    main()
