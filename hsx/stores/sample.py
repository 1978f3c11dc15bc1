"""One sample as `hsx.stores.reader` gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsx.errors import RunError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One committed sample, or the part of it that was asked for.

    The arrays are numpy's; the properties without `_numpy` give torch tensors. A store may keep the states of some tokens alone
    (`storage.tokens`): ids and loss mask are whole all the same, and `positions` says which tokens the rows are of.

    Attributes:
        index: its index in the store.
        id: its id in the dataset.
        state_names: names of the L states, in stored order.
        input_ids_numpy: int32 [tokens].
        loss_mask_numpy: uint8 [tokens] of 0 and 1.
        hidden_states_numpy: bf16 bits, uint16 [rows, L, H]; as many rows as tokens, unless the store keeps fewer.
        positions_numpy: int64 [rows], the token, of those here, that each row is of; None where every token has its row.
    """

    index: int
    id: str
    state_names: tuple[str, ...]
    input_ids_numpy: NDArray[np.int32]
    loss_mask_numpy: NDArray[np.uint8]
    hidden_states_numpy: NDArray[np.uint16]
    positions_numpy: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        rows, states, width = self.hidden_states_numpy.shape
        kept = "" if self.positions_numpy is None else f", states of {rows}"
        return (
            f"<sample {self.index}, {self.id!r}: {self.tokens} tokens{kept}, {states} x {width}: {', '.join(self.state_names)}>"
        )

    @property
    def tokens(self) -> int:
        """Length of the prompt, or of the part that was read."""
        return len(self.input_ids_numpy)

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 [tokens]."""
        return int64(self.input_ids_numpy)

    @property
    def loss_mask(self) -> torch.Tensor:
        """int64 [tokens] of 0 and 1."""
        return int64(self.loss_mask_numpy)

    @property
    def hidden_states(self) -> torch.Tensor:
        """bfloat16 [rows, L, H], sharing memory with `hidden_states_numpy`."""
        return bfloat16(self.hidden_states_numpy)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [rows]: the token that each row of `hidden_states` is of."""
        import torch  # as below

        return torch.arange(self.tokens) if self.positions_numpy is None else torch.from_numpy(self.positions_numpy)

    def spread(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The states at their tokens' places: bfloat16 [tokens, L, H], NaN where none is stored; and bool [tokens], where one
        is."""
        import torch  # as below

        rows, positions = self.hidden_states, self.positions
        whole = torch.full((self.tokens, *rows.shape[1:]), torch.nan, dtype=torch.bfloat16)
        whole[positions] = rows
        there = torch.zeros(self.tokens, dtype=torch.bool)
        there[positions] = True
        return whole, there

    def state(self, name: str) -> torch.Tensor:
        """One state, such as `h_2` or `post_norm`: bfloat16 [rows, H], a view. Raises RunError `sample_unknown`."""
        if name not in self.state_names:
            raise RunError("sample_unknown", f"sample {self.index} has no state {name!r}; it has {', '.join(self.state_names)}")
        return self.hidden_states[:, self.state_names.index(name)]


def int64(values: NDArray[Any]) -> torch.Tensor:
    """A copy of whole numbers as int64, of the same shape."""
    import torch  # numpy readers of a store, and the commands, do without it

    return torch.from_numpy(values.astype(np.int64))


def bfloat16(bits: NDArray[np.uint16]) -> torch.Tensor:
    """bf16 bits, uint16, as bfloat16 of the same shape, sharing memory."""
    import torch  # as above

    return torch.from_numpy(bits).view(torch.bfloat16)
