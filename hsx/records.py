"""The records that cross a port: plain values, given from an adapter to the core or back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsx.core.marker import Marker, parse

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hsx.core.sample import Lease


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row of a dataset.

    Attributes:
        sample_id: the row's id as text; unique in the dataset.
        input_ids: int32 [tokens], at least one.
        loss_mask: uint8 [tokens] of 0 and 1.
        line: 1-based line (or row) number in the file; in several files they are counted through.
        cut: tokens that were cut off, because the row was too long.
    """

    sample_id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    line: int
    cut: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """One row that cannot be used.

    Attributes:
        line: 1-based line (or row) number in the file; in several files they are counted through.
        sample_id: the row's id where it could be read, else "".
        reason: stable name: `not_json`, `missing_field`, `empty`, `bad_type`, `out_of_vocabulary`, `too_long`, `duplicate_id`,
            `mask_length`, `bad_mask`, `bad_chat`, `no_loss`, `doubled_start`.
        message: what was expected and what was found.
        unit: what `line` counts: "line" of JSONL, "row" of a table.
    """

    line: int
    sample_id: str
    reason: str
    message: str
    unit: str = "line"

    @property
    def named(self) -> str:
        """Which row it is, for a message: `line 3`, and its id where it has one: `row 3, id 'a'`."""
        return f"{self.unit} {self.line}" + (f", id {self.sample_id!r}" if self.sample_id else "")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the running server says of itself; checked at the boot gate.

    Attributes:
        engine_version: the server package's version.
        model: model path it serves.
        max_prompt_tokens: longest prompt that it accepts with `max_new_tokens` 0 or 1.
        vocab_size: its vocabulary, or None where it does not tell.
        dp_size: its data-parallel ranks, with or without DP attention.
        problems: sentences, each naming the server argument to change, on why capture would be wrong (radix cache on,
            pp_size > 1, speculative decoding); empty when the server is fit.
    """

    engine_version: str
    model: str
    max_prompt_tokens: int
    vocab_size: int | None
    problems: tuple[str, ...]
    dp_size: int = 1


@dataclass(frozen=True, slots=True)
class Payload:
    """One sample's states, on their way to a root, with what their shard says of them.

    Attributes:
        marker: the attempt's marker; names the sample and its tokens.
        epoch: the server's epoch.
        sequence: the dump's capture number.
        input_ids: int32 [tokens], the sample's ids.
        states: bf16 bits, uint16 [tokens, L, H], C-contiguous; page-aligned for the best speed. Neither changed nor kept.
        crcs: crc32c of the rows of each inner chunk of the store, in order, taken when the states were judged; empty: to be
            reckoned. The last one covers the real rows alone.
        source: (descriptor, offset) of the file that `states` is a mapping of, for copies within the kernel; None: not known.
        kept: positions of the tokens that the store keeps, rising, int64 [rows], at least one; None: all. `states` are whole.
    """

    marker: Marker
    epoch: str
    sequence: int
    input_ids: NDArray[np.int32]
    states: NDArray[np.uint16]
    crcs: tuple[int, ...] = ()
    source: tuple[int, int] | None = None
    kept: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What writing one shard gave.

    Attributes:
        root: name of the root it lies on.
        nbytes: size of the shard file.
        crc32c: of the payload (all bytes of the rows as they are stored, token-major, padding excluded).
    """

    root: str
    nbytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Commit:
    """One sample's entry in a group commit.

    Attributes:
        lease: the attempt that succeeded.
        marker: its marker.
        epoch: the server's epoch.
        sequence: the dump's capture counter.
        receipt: where and how the shard was written.
        timings: seconds spent per step, by name: `request`, `dump`, `validate`, `write`.
        adopted: the dump was found after a restart of hsx, not requested by this process.
        shared: samples with the very same prompt that are committed with it: their shards are links to this one.
    """

    lease: Lease
    marker: Marker
    epoch: str
    sequence: int
    receipt: Receipt
    timings: dict[str, float]
    adopted: bool
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CommittedRow:
    """The ledger's entry of one committed sample; see `Commit` and `Receipt` for the fields."""

    index: int
    root: str
    crc32c: int
    nbytes: int
    tokens: int
    marker: str
    epoch: str
    sequence: int

    @property
    def captured_as(self) -> int:
        """The sample whose prefill gave the shard, as the shard's own record says: itself, or one with the same prompt."""
        marker = parse(self.marker)
        return self.index if marker is None else marker.index

    @property
    def own_bytes(self) -> int:
        """What its shard adds to the disk: nothing, where it is a link to that of a sample with the same prompt."""
        return self.nbytes if self.captured_as == self.index else 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Samples of a job by state, and tokens and bytes committed.

    Of the committed ones, `shared` samples with `tokens_shared` tokens were not prefilled: their shards are links to that of a
    sample with the same prompt. `bytes_shared` is what these would take; it is not part of `bytes_committed`.
    """

    pending: int
    committed: int
    quarantined: int
    rejected: int
    tokens_total: int
    tokens_committed: int
    bytes_committed: int
    shared: int = 0
    tokens_shared: int = 0
    bytes_shared: int = 0
