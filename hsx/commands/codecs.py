"""`hsx plan --sample`: what compression would save, measured on states of the job's model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsx.commands.output import table
from hsx.core.amounts import in_words
from hsx.core.dump import SUFFIX
from hsx.dumps.reader import MappedDump
from hsx.errors import RunError
from hsx.stores.codec_sample import CHUNKS, CodecTrial, try_codecs
from hsx.stores.reader import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray


def try_on(source: str, hidden_size: int, chunk_tokens: int) -> list[CodecTrial]:
    """Tries every codec on states of a store, a dump, or a folder of dumps.

    Args:
        source: its path.
        hidden_size: H of the job's model, which they have to be of.
        chunk_tokens: tokens of an inner chunk of the job's store: so many are compressed at a time.

    Raises:
        RunError: `not_run_yet` where there is nothing at the path; `usage` where the states are of another width;
            `sample_unknown` where a store has no committed sample yet; what `hsx.open` raises.
        SampleError: `dump_invalid`.
    """
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise RunError("not_run_yet", f"{path} does not exist; give --sample a store or a dump of this model")
    dumps = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))[:CHUNKS]
    chunks = [_of_dump(dump, chunk_tokens) for dump in dumps] if dumps else _of_store(path, chunk_tokens)
    width = chunks[0].shape[-1]
    if width != hidden_size:
        raise RunError("usage", f"{path} has states of width {width}; the job's model has {hidden_size}")
    return try_codecs(chunks)


def _of_dump(path: Path, chunk_tokens: int) -> NDArray[np.uint16]:
    dump = MappedDump(path)
    middle = max((dump.header.tokens - chunk_tokens) // 2, 0)
    chunk = dump.states[middle : middle + chunk_tokens].copy()
    dump.close()
    return chunk


def _of_store(path: Path, chunk_tokens: int) -> list[NDArray[np.uint16]]:
    store = Store(path)
    committed = store.committed
    if store.info.layout.dtype != "bf16":
        raise RunError("usage", f"store {path} has states in {store.info.layout.dtype}; expected bf16, to try codecs on")
    if not len(committed):
        raise RunError(
            "sample_unknown",
            f"store {path} has no committed sample to try codecs on; give --sample another store or dump of this model",
        )
    chosen = committed[np.linspace(0, len(committed) - 1, min(CHUNKS, len(committed))).astype(np.int64)]
    chunks = []
    for index in map(int, chosen):
        if store.info.layout.selects:
            chunks.append(store.hidden_states_numpy(index)[:chunk_tokens])
            continue
        middle = max((store.tokens(index) - chunk_tokens) // 2, 0)
        chunks.append(store.hidden_states_numpy(index, middle, min(middle + chunk_tokens, store.tokens(index))))
    return chunks


def as_json(trials: list[CodecTrial], payload_bytes: int) -> list[dict[str, Any]]:
    """The trials as JSON values, with what they make of a job's payload."""
    return [
        {
            "codec": trial.codec,
            "ratio": trial.ratio,
            "stored_bytes": round(payload_bytes / trial.ratio),
            "write_cpu_s_per_gb": trial.write_s_per_gb,
            "read_cpu_s_per_gb": trial.read_s_per_gb,
        }
        for trial in trials
    ]


def describe(trials: list[CodecTrial], payload_bytes: int, chosen: str) -> str:
    """The trials as a table."""
    rows = [
        (
            trial.codec + (" (the job's)" if trial.codec == chosen else ""),
            f"{trial.ratio:.3f}",
            in_words(round(payload_bytes / trial.ratio)),
            f"{trial.write_s_per_gb:.2f}",
            f"{trial.read_s_per_gb:.2f}",
        )
        for trial in trials
    ]
    return table(("codec", "ratio", "payload takes", "CPU s/GB to write", "to read"), rows)
