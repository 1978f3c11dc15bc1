"""One sample of a store, described for a person: its ids, the norms of its states, and where it lies."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from hsx.errors import RunError
from hsx.stores.reader import Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from hsx.records import CommittedRow

IDS: Final = 8
_BLOCK: Final = 256
_LONGEST_INDEX: Final = 18
"""Digits; text may have thousands, which Python takes for no number."""


@dataclass(frozen=True, slots=True)
class StateNorms:
    """Euclidean norms of one state's rows, over all tokens."""

    name: str
    mean: float
    smallest: float
    largest: float


@dataclass(frozen=True, slots=True)
class SampleView:
    """What there is to say of one sample.

    Attributes:
        index: its index in the store.
        sample_id: its id.
        tokens: length of its prompt.
        loss_tokens: tokens that the loss mask keeps.
        stored_tokens: tokens whose states the store keeps.
        dtype: what their states are stored as.
        first_ids: the first `IDS` ids.
        last_ids: the last `IDS` ids; empty where `first_ids` holds all.
        committed: whether the union view shows it; without that, there are no norms and no place.
        states: norms of each state, in stored order.
        shard: path of its shard.
        nbytes: size of the shard file.
        root: root that the ledger names, as the next four; None without a ledger row.
        crc32c: of the payload.
        marker: of the attempt that was committed.
        epoch: of the server that computed it.
        sequence: the capture counter.
        captured_as: the sample whose prefill gave the shard: itself, or one with the same prompt.
        twins: samples with the same prompt that share a prefill with it, by the ledger.
    """

    index: int
    sample_id: str
    tokens: int
    loss_tokens: int
    first_ids: list[int]
    last_ids: list[int]
    committed: bool
    states: list[StateNorms]
    shard: str | None
    nbytes: int | None
    root: str | None
    crc32c: int | None
    marker: str | None
    epoch: str | None
    sequence: int | None
    captured_as: int | None = None
    twins: tuple[int, ...] = ()
    stored_tokens: int | None = None
    dtype: str = "bf16"

    def as_dict(self) -> dict[str, Any]:
        """The view as JSON values."""
        return asdict(self)


def show(
    store_path: str | PathLike[str], key: int | str, row: CommittedRow | None = None, twins: Sequence[int] = ()
) -> SampleView:
    """Looks at one sample.

    Args:
        store_path: the store.
        key: index or id; text that is no id but a decimal number is taken as an index.
        row: the ledger's entry, if there is one.
        twins: samples with the same prompt, by the ledger.

    Raises:
        RunError: `sample_unknown`, `store_invalid` (no store, or a damaged shard).
    """
    store = Store(store_path)
    index = find(store, key)
    ids = store.input_ids_numpy(index).tolist()
    committed = index in store
    shard = store.shard_path(index) if committed else None
    norms = row_norms(store.hidden_states_numpy(index)) if committed else None
    return SampleView(
        index=index,
        sample_id=store.sample_id(index),
        tokens=len(ids),
        loss_tokens=int(store.loss_mask_numpy(index).sum()),
        first_ids=ids[:IDS],
        last_ids=ids[max(len(ids) - IDS, IDS) :],
        committed=committed,
        states=[] if norms is None else _summaries(store.state_names, norms),
        shard=str(shard) if shard is not None else None,
        nbytes=shard.stat().st_size if shard is not None else None,
        root=row.root if row else None,
        crc32c=row.crc32c if row else None,
        marker=row.marker if row else None,
        epoch=row.epoch if row else None,
        sequence=row.sequence if row else None,
        captured_as=row.captured_as if row else None,
        twins=tuple(twins),
        stored_tokens=len(store.positions_numpy(index)),
        dtype=store.info.layout.dtype,
    )


def find(store: Store, key: int | str, by: Literal["either", "id", "index"] = "either") -> int:
    """The index of a sample given as on a command line.

    Args:
        store: the store.
        key: the text that was given, or an index.
        by: what it is; `either`: an id, or else an index (see `index_passed_over`).

    Raises RunError `sample_unknown`; `usage` where it is to be an index and is no number.
    """
    if not isinstance(key, str):
        return store.index(key)
    if by == "index":
        if not key.isdecimal() or len(key) > _LONGEST_INDEX:
            raise RunError("usage", f"--index takes the index of a sample, from 0; it is {key!r}")
        return store.index(int(key))
    try:
        return store.index(key)
    except RunError:
        if by == "either" and key.isdecimal() and len(key) <= _LONGEST_INDEX:
            return store.index(int(key))
        raise


def index_passed_over(store: Store, key: str, found: int) -> int | None:
    """The other sample that `find` might have meant, whose index the key is; None where there is none."""
    if not key.isdecimal() or len(key) > _LONGEST_INDEX:
        return None
    other = int(key)
    return other if other < len(store) and other != found else None


def row_norms(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Euclidean norm of each row: float64 [tokens, L] from bf16 bits [tokens, L, H]."""
    norms = np.empty(bits.shape[:2], np.float64)
    for start in range(0, len(bits), _BLOCK):
        values = (bits[start : start + _BLOCK].astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        norms[start : start + _BLOCK] = np.sqrt(np.einsum("tlh,tlh->tl", values, values))
    return norms


def _summaries(names: tuple[str, ...], norms: NDArray[np.float64]) -> list[StateNorms]:
    return [
        StateNorms(name, float(column.mean()), float(column.min()), float(column.max()))
        for name, column in zip(names, norms.T, strict=True)
    ]
