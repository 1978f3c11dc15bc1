"""What `hsx.open` returns: a store, read sample by sample, in batches or in parts.

Reads through the union view, so it needs no ledger and works beside a running job and on a finished store alike. Of a sealed
store it needs no union view either: the store's own arrays say what is committed, and on which root.
"""

from __future__ import annotations

import operator
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import numpy as np

from hsx.errors import RunError
from hsx.stores.buffers import BufferPool
from hsx.stores.checksum import ids_digest
from hsx.stores.group import open_store, read_final_norm
from hsx.stores.metadata import HIDDEN_STATES
from hsx.stores.places import Places
from hsx.stores.reduced import decode
from hsx.stores.sample import StoredSample, bfloat16
from hsx.stores.seal import read_seal
from hsx.stores.selection import digest, kept_positions, stored_counts
from hsx.stores.shard_reader import ShardError, ShardFile
from hsx.stores.tokens import TokenTable
from hsx.stores.view import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from os import PathLike
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

    from hsx.core.layout import StoreLayout
    from hsx.stores.group import StoreInfo
    from hsx.stores.seal import SealedArrays


THREADS: Final = 2
"""Threads of a batch read: what one waits for the disk, another computes checksums."""


class Store:
    """A store, open for reading. Cheap to open, picklable, and safe to use from several threads and after a fork.

    `store[i]` and `store["id"]` read a sample, `read` a list of them, `stream` reads ahead; iterating gives the committed
    ones in order of their index, `len` counts all samples of the job, committed or not.

    Args:
        path: the group's folder.
        roots: where roots are mounted today, by name, if not where the store says and not beside it; see `Places`.
        check: prove every inner chunk that is read by its crc32c, and every shard to be its sample's by its own record.

    Raises:
        RunError: `store_invalid` where `path` is not an hsx store or its token arrays cannot be read; `root_unusable` where
            `roots` names something that is no root of it.
    """

    def __init__(
        self, path: str | PathLike[str], *, roots: Mapping[str, str | PathLike[str]] | None = None, check: bool = True
    ) -> None:
        self._info = open_store(path)
        self._given = {name: os.fspath(given) for name, given in (roots or {}).items()}
        self._places = Places(self._info, self._given)
        self._check = check
        self._pool = BufferPool()
        self._table = TokenTable(self._info.path)
        if self._table.count != self._info.layout.samples:
            raise RunError(
                "store_invalid",
                f"store {self.path} has token arrays of {self._table.count} samples; expected {self._info.layout.samples}",
            )

    def __repr__(self) -> str:
        count, samples = len(self.committed), len(self)
        states = ", ".join(self.state_names)
        return f"<hsx store {self.path}: {count} of {samples} samples, states {states}, H = {self.hidden_size}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (str(self.path), self._given, self._check))

    @property
    def info(self) -> StoreInfo:
        """What the store says of itself: id, layout, capture spec, model, and its roots where they were when it was written."""
        return self._info

    @property
    def roots(self) -> dict[str, Path]:
        """Where the shards of each root lie now, `<root path>/<store_id>`; without roots that are not there."""
        return self._places.folders

    @property
    def path(self) -> Path:
        """The group's folder."""
        return self._info.path

    @property
    def metadata(self) -> dict[str, Any]:
        """The group's `hsx` attribute: JSON values, see docs/on-disk-format.md."""
        return dict(self._info.attributes["hsx"])

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the L states, in stored order, such as `("h_2", "h_15", "post_norm")`."""
        return self._info.spec.names

    @property
    def hidden_size(self) -> int:
        """H."""
        return self._info.layout.hidden_size

    @property
    def final_norm(self) -> tuple[NDArray[np.float32], float] | None:
        """Weight, float32 [H], and eps of the model's final norm; None where no server has reported it yet."""
        return read_final_norm(self.path)

    @cached_property
    def committed(self) -> NDArray[np.int64]:
        """Indices of the samples that are there, sorted; as of the first use or the last `refresh`."""
        if self._sealed is not None:
            return np.flatnonzero(self._sealed.committed)
        return visible(self.path / HIDDEN_STATES)

    @cached_property
    def _sealed(self) -> SealedArrays | None:
        return None if self._info.sealed is None else read_seal(self._info)

    def refresh(self) -> None:
        """Looks again for committed samples, in the store of a running job."""
        self.__dict__.pop("committed", None)

    def __len__(self) -> int:
        return self._info.layout.samples

    def __iter__(self) -> Iterator[StoredSample]:
        return self.stream()

    def __contains__(self, key: object) -> bool:
        try:
            index = self.index(key) if isinstance(key, int | str) else -1
        except RunError:
            return False
        return index >= 0 and self._committed(index)

    def __getitem__(self, key: SupportsIndex | str) -> StoredSample:
        return self.sample(key)

    def index(self, key: SupportsIndex | str) -> int:
        """The index of a sample given by index (negative ones count from the end) or id. Raises RunError `sample_unknown`."""
        if isinstance(key, str):
            return self._table.index_of(key)
        try:
            index = operator.index(key)
        except TypeError:
            kind = type(key).__name__
            raise TypeError(f"a sample's key is a {kind}; expected an index or an id (for several: store.read(keys))") from None
        if not -len(self) <= index < len(self):
            raise RunError("sample_unknown", f"store {self.path} has no sample {index}; it has {len(self)} samples")
        return index % len(self)

    def tokens(self, key: SupportsIndex | str) -> int:
        """Prompt length of a sample, committed or not. Raises RunError `sample_unknown`."""
        return self._table.tokens(self.index(key))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Prompt length of every sample, committed or not: int64 [samples]."""
        return self._table.lengths

    def input_ids_numpy(self, key: SupportsIndex | str) -> NDArray[np.int32]:
        """Ids of a sample, committed or not: int32 [tokens]. Raises RunError `sample_unknown`."""
        return self._table.input_ids(self.index(key))

    def loss_mask_numpy(self, key: SupportsIndex | str) -> NDArray[np.uint8]:
        """Loss mask of a sample, committed or not: uint8 [tokens]. Raises RunError `sample_unknown`."""
        return self._table.loss_mask(self.index(key))

    def positions_numpy(self, key: SupportsIndex | str) -> NDArray[np.int64]:
        """The tokens of a sample, committed or not, whose states this store keeps, rising: int64 [rows]. Raises as above."""
        index, layout = self.index(key), self._info.layout
        if not layout.selects:
            return np.arange(self._table.tokens(index))
        return kept_positions(self._table.loss_mask(index), layout.context)

    @cached_property
    def row_counts(self) -> NDArray[np.int64]:
        """How many tokens of each sample, committed or not, this store keeps: int64 [samples]. Reads all loss masks, once."""
        return stored_counts(self._table, self._info.layout)

    def sample_id(self, key: SupportsIndex) -> str:
        """Id of a sample, committed or not. Raises RunError `sample_unknown`."""
        return self._table.sample_id(self.index(key))

    def sample(
        self, key: SupportsIndex | str, start: int = 0, stop: int | None = None, *, states: Sequence[str] | None = None
    ) -> StoredSample:
        """Reads a sample by index or id, or its tokens from `start` up to `stop`, or some of its states.

        Raises RunError: `sample_unknown` where there is none, it is not committed, or it has no such state; `store_invalid`
        where its shard is missing, torn, changed, or another sample's; `root_unusable` where its root is not there. Raises
        ValueError for tokens that the sample does not have.
        """
        index = self.index(key)
        start, stop = self._range(index, start, stop)
        positions = None
        if self._info.layout.selects:
            positions = self.positions_numpy(index)
            positions = positions[np.searchsorted(positions, start) : np.searchsorted(positions, stop)] - start
        return StoredSample(
            index=index,
            id=self._table.sample_id(index),
            state_names=self.state_names if states is None else self.require_states(states),
            input_ids_numpy=self._table.input_ids(index)[start:stop],
            loss_mask_numpy=self._table.loss_mask(index)[start:stop],
            hidden_states_numpy=self.hidden_states_numpy(index, start, stop, states=states),
            positions_numpy=positions,
        )

    def read(
        self, keys: Iterable[SupportsIndex | str], *, states: Sequence[str] | None = None, threads: int = THREADS
    ) -> list[StoredSample]:
        """Reads several samples, in the order of `keys`; see `stream`."""
        return list(self.stream(keys, states=states, threads=threads))

    def stream(
        self,
        keys: Iterable[SupportsIndex | str] | None = None,
        *,
        states: Sequence[str] | None = None,
        threads: int = THREADS,
        ahead: int | None = None,
    ) -> Iterator[StoredSample]:
        """Samples one after the other, of which the next ones are read by threads meanwhile.

        Args:
            keys: indices or ids; default: all that are committed, in order of their index.
            states: names of the states to read; default: all.
            threads: reading threads; 0 to read in this one, when it is asked for.
            ahead: samples read or being read before they are asked for; they are in memory. Default: as many as threads.

        Raises:
            RunError, ValueError: as `sample`, when it comes to that sample; ValueError for negative numbers.
        """
        ahead = threads if ahead is None else ahead
        if threads < 0 or ahead < 0:
            raise ValueError(f"threads is {threads} and ahead {ahead}; expected at least 0")
        indices = iter(self.committed.tolist() if keys is None else keys)
        if not threads or not ahead:
            return (self.sample(key, states=states) for key in indices)
        return self._read_ahead(indices, states, threads, ahead)

    def _read_ahead(
        self, keys: Iterator[SupportsIndex | str], states: Sequence[str] | None, threads: int, ahead: int
    ) -> Iterator[StoredSample]:
        pending: deque[Future[StoredSample]] = deque()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="hsx-read")
        try:
            for key in keys:
                pending.append(pool.submit(self.sample, key, states=states))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # also where the caller has had enough
            pool.shutdown(cancel_futures=True)

    def hidden_states_numpy(
        self,
        key: SupportsIndex | str,
        start: int = 0,
        stop: int | None = None,
        *,
        states: Sequence[str] | None = None,
        out: NDArray[np.uint16] | None = None,
    ) -> NDArray[np.uint16]:
        """bf16 bits of a sample's tokens from `start` up to `stop` (default: all), uint16 [rows, L, H].

        There are stop - start rows, or, where the store keeps fewer tokens, those of `positions_numpy` in that range. Reads
        only the inner chunks that hold them. With `states`, L is their number and they come in that order; an inner chunk
        holds all states of its tokens, so this saves memory and not reading. `out`, C-contiguous uint16 of that shape, is
        filled and returned if given. Raises as `sample`, and ValueError for an `out` that does not fit.
        """
        index = self.index(key)
        start, stop = self._range(index, start, stop)
        columns = None if states is None else [self.state_names.index(name) for name in self.require_states(states)]
        layout = self._info.layout
        if layout.selects:
            start, stop = np.searchsorted(self.positions_numpy(index), (start, stop)).tolist()
        if out is None:
            out = self.empty((stop - start, layout.states if columns is None else len(columns), layout.hidden_size))
        with self._open(index) as shard:
            if columns is None and layout.dtype == "bf16":
                return shard.read(start, stop, out)
            return _columns(shard, start, stop, columns or list(range(layout.states)), layout, out)

    def stored_numpy(self, key: SupportsIndex | str) -> NDArray[np.uint8]:
        """The rows of a sample as they are stored, proved and not converted: uint8 [rows, L, bytes].

        In an fp8 store these are H e4m3 values and their scale (`hsx.stores.fp8`), else 2 H bytes of bf16. Raises as `sample`.
        """
        with self._open(self.index(key)) as shard:
            return shard.read().view(np.uint8)

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.uint16]:
        """Memory for bf16 bits, of any content, that earlier reads of this store are done with; for `out`."""
        return self._pool.empty(shape)

    def hidden_states(
        self, key: SupportsIndex | str, start: int = 0, stop: int | None = None, *, states: Sequence[str] | None = None
    ) -> torch.Tensor:
        """As `hidden_states_numpy`, as bfloat16."""
        return bfloat16(self.hidden_states_numpy(key, start, stop, states=states))

    def require_states(self, names: Sequence[str]) -> tuple[str, ...]:
        """`names`, if the store has states of these names. Raises RunError `sample_unknown`."""
        if isinstance(names, str):
            names = (names,)
        for name in names:
            if name not in self.state_names:
                known = ", ".join(self.state_names)
                raise RunError("sample_unknown", f"store {self.path} has no state {name!r}; it has {known}")
        return tuple(names)

    def captured_as(self, key: SupportsIndex | str) -> int:
        """The sample whose prefill gave a committed one's shard: itself, or one with the same prompt, whose shard it shares.

        Raises as `sample`.
        """
        index = self.index(key)
        if not self._info.layout.records:
            return index
        with self._open(index) as shard:
            return shard.record().index

    def shard_crc32c(self, key: SupportsIndex | str) -> int | None:
        """The crc32c of a committed sample's payload, out of its shard's record; None in a store whose shards have none.

        Another one than before says that the sample was committed anew. Raises as `sample`.
        """
        index = self.index(key)
        if not self._info.layout.records:
            return None
        with self._open(index) as shard:
            return shard.record().crc32c

    def shard_path(self, key: SupportsIndex | str) -> Path:
        """Where the shard of a committed sample is, links followed. Raises as `sample`, but for what reading it would find."""
        index = self.index(key)
        path = self._places.shard(index)
        return (path if path.exists() else self._elsewhere(index)).resolve()

    def _range(self, index: int, start: int, stop: int | None) -> tuple[int, int]:
        tokens = self._table.tokens(index)
        stop = tokens if stop is None else stop
        if not 0 <= start <= stop <= tokens:
            raise ValueError(f"tokens {start} to {stop} are asked for; sample {index} has {tokens}")
        return start, stop

    def _open(self, index: int) -> ShardFile:
        try:
            return self._shard(index, self._places.shard(index))
        except ShardError as error:
            if error.problem != "missing":
                raise
        return self._shard(index, self._elsewhere(index))

    def _elsewhere(self, index: int) -> Path:
        """The place of a shard that is not where the union view says: where it was found, or else should be."""
        if not self._committed(index):
            raise RunError("sample_unknown", f"sample {index} of store {self.path} is not committed")
        root = self._sealed.root_of(index) if self._sealed is not None else None
        return self._places.search(index, root) or self._places.shard(index)

    def _committed(self, index: int) -> bool:
        if self._sealed is not None:
            return bool(self._sealed.committed[index])
        return os.path.lexists(self._places.link(index))

    def _shard(self, index: int, path: Path) -> ShardFile:
        owner = (self._info.store_id, index) if self._check else None
        rows, positions = self._table.tokens(index), None
        if self._info.layout.selects:
            positions = self.positions_numpy(index)
            rows = len(positions)
        shard = ShardFile(
            path,
            self._info.layout,
            rows,
            check=self._check,
            owner=owner,
            ids=lambda: ids_digest(self._table.input_ids(index)),
            kept=None if positions is None else lambda: digest(positions),
            cached=True,
        )
        if owner is not None and self._sealed is not None and self._info.layout.records and self._sealed.committed[index]:
            found, sealed = shard.record().crc32c, int(self._sealed.crc32c[index])
            if found != sealed:  # another attempt's: an older copy of the disk, say
                shard.close()
                raise ShardError("record", path, f"says that its payload is {found:08x}; expected {sealed:08x} as sealed")
        return shard


def _reopen(path: str, roots: dict[str, str], check: bool) -> Store:
    return Store(path, roots=roots, check=check)


def _columns(
    shard: ShardFile, start: int, stop: int, columns: list[int], layout: StoreLayout, out: NDArray[np.uint16]
) -> NDArray[np.uint16]:
    """Some states of a shard's rows as bf16, taken out of one inner chunk after the other."""
    shape = (stop - start, len(columns), layout.hidden_size)
    if out.shape != shape or out.dtype != np.uint16:
        raise ValueError(f"out is {out.dtype} {out.shape}; expected uint16 {shape}")
    rows = np.empty((layout.chunk_tokens, layout.states, layout.row_words), np.uint16)
    whole = columns == list(range(layout.states))
    for first in range(start - start % layout.chunk_tokens, stop, layout.chunk_tokens):
        low, high = max(first, start), min(first + layout.chunk_tokens, stop)
        part = shard.read(low, high, rows[: high - low])
        if whole:
            decode(part, layout, out[low - start : high - start])
            continue
        part = decode(part, layout)
        for at, column in enumerate(columns):
            out[low - start : high - start, at] = part[:, column]
    return out
