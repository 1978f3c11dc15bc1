"""Small stores made of given or random states, written by the real writer: for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.records import CommittedRow, Payload, Row
from hsx.stores.attach import attach_roots
from hsx.stores.group import StoreInfo, create_store
from hsx.stores.selection import kept_of
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.tokens import TokenTable
from hsx.stores.view import UnionView

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.stores.root import ShardRoot

RUN = "deadbeef"
EPOCH = "00000000-0000-4000-8000-000000000001"


@dataclass(frozen=True, slots=True)
class BuiltStore:
    """A store and all that went into it.

    Attributes:
        info: the store.
        roots: its roots, by turns taking the samples.
        view: its union view.
        states: bf16 bits [tokens, L, H] of each sample.
        input_ids: int32 [tokens] of each sample.
        rows: what a ledger would say of each sample.
    """

    info: StoreInfo
    roots: list[ShardRoot]
    view: UnionView
    states: list[NDArray[np.uint16]]
    input_ids: list[NDArray[np.int32]]
    rows: list[CommittedRow]

    def shard(self, index: int) -> Path:
        """The shard file of a sample, on its root."""
        return self.info.folder(self.rows[index].root) / self.view.path(index).name


def random_bits(rng: np.random.Generator, tokens: int, states: int, hidden_size: int) -> NDArray[np.uint16]:
    """Any bf16 bits, with infinities, NaN, subnormals and zeros of both signs among them: uint16 [tokens, L, H]."""
    bits = rng.integers(0, 1 << 16, (tokens, states, hidden_size), dtype=np.uint16)
    extremes = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF], np.uint16)
    flat = bits.reshape(-1)
    flat[: len(extremes)] = extremes[: flat.size]
    return bits


def random_states(rng: np.random.Generator, tokens: int, states: int, hidden_size: int) -> NDArray[np.uint16]:
    """bf16 bits of normally distributed values, which the content invariants accept: uint16 [tokens, L, H]."""
    values = rng.standard_normal((tokens, states, hidden_size), np.float32)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def payload(marker: Marker, states: NDArray[np.uint16], input_ids: NDArray[np.int32] | None = None) -> Payload:
    """A payload as the pipeline would make it of a dump with these states; ids default to 0, 1, 2..."""
    ids = np.arange(len(states), dtype=np.int32) if input_ids is None else input_ids
    return Payload(marker, EPOCH, marker.index + 1, ids, states)


def build_store(
    folder: Path,
    states: Sequence[NDArray[np.uint16]],
    *,
    roots: Sequence[str] = ("a", "b"),
    committed: int | None = None,
    input_ids: Sequence[NDArray[np.int32]] | None = None,
    spec: CaptureSpec | None = None,
    direct: bool = True,
    codec: str = "none",
    masks: Sequence[NDArray[np.uint8]] | None = None,
    names: Sequence[str] | None = None,
    **less: Any,  # noqa: ANN401 - passed on
) -> BuiltStore:
    """Writes a store to `folder/store`, with roots `folder/<name>` that take the samples by turns.

    Args:
        folder: an existing folder.
        states: bf16 bits [tokens, L, H] of each sample; L is at least 2.
        roots: names of the roots.
        committed: only the first so many samples are written and shown; default: all.
        input_ids: ids of each sample; default: drawn from a vocabulary of 1000.
        spec: the capture spec; default: h_1 up to h_{L-1}, and post_norm.
        direct: use O_DIRECT where the file system has it.
        codec: how inner chunks are compressed.
        masks: loss mask of each sample, uint8 [tokens]; default: every other token.
        names: id of each sample; default: `sample-0`, `sample-1`...
        less: `kept`, `context` and `dtype` of the layout, for a store that keeps less.
    """
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 1000, len(s), dtype=np.int32) for s in states] if input_ids is None else list(input_ids)
    with TokenTableWriter(folder / "store") as table:
        for index, sample in enumerate(ids):
            mask = (np.arange(len(sample)) % 2).astype(np.uint8) if masks is None else masks[index]
            name = f"sample-{index}" if names is None else names[index]
            table.add(Row(sample_id=name, input_ids=sample, loss_mask=mask, line=index + 1))
        table.finish({"sha256": "none"}, {})
    _, vectors, width = states[0].shape
    layout = StoreLayout(len(states), max(len(s) for s in states), vectors, width, codec=codec, **less)
    spec = spec or CaptureSpec(tuple(range(1, vectors)), "post_norm")
    info = create_store(folder / "store", layout, spec, {"name": "test"})
    places = {name: folder / name for name in roots}
    for place in places.values():
        place.mkdir(exist_ok=True)
    info, shard_roots = attach_roots(info, places, direct=direct)
    view = UnionView(info)
    kept = kept_of(TokenTable(info.path), layout)
    rows = []
    for index, sample_states in enumerate(states[:committed]):
        root = shard_roots[index % len(shard_roots)]
        marker = Marker(RUN, index, 1, len(sample_states))
        receipt = root.write(replace(payload(marker, sample_states, ids[index]), kept=kept(index)))
        view.link(index, root.name)
        rows.append(
            CommittedRow(
                index, root.name, receipt.crc32c, receipt.nbytes, len(sample_states), str(marker), EPOCH, sequence=index + 1
            )
        )
    for root in shard_roots:
        root.sync()
    return BuiltStore(info, shard_roots, view, list(states), ids, rows)
