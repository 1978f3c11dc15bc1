"""What a format has to say, and the sample that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from hsx.core.spec import FinalState
    from hsx.export.files import CheckedFile


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Sizes of the vocabularies.

    Attributes:
        target: the model's; None where nobody has said.
        draft: the draft's; None where no mapping is asked for.
    """

    target: int | None = None
    draft: int | None = None

    def __post_init__(self) -> None:
        if self.draft is None:
            return
        if self.target is None:
            raise RunError("export_refused", "a vocabulary mapping needs the model's vocabulary; expected --vocab-size N")
        if not 0 < self.draft <= self.target:
            raise RunError(
                "export_refused", f"--draft-vocab is {self.draft}; expected 1 up to the model's vocabulary, {self.target}"
            )


@dataclass(frozen=True, slots=True)
class Exported:
    """One sample, as formats get it.

    Attributes:
        row: its number in the export, from 0.
        id: its id in the dataset.
        input_ids: int64 [S].
        loss_mask: int64 [S] of 0 and 1.
        states: bfloat16 [S, K + 1, H], contiguous: the K chosen layers, and last the final state.
        state_names: names of the K + 1 states, such as `("h_2", "h_18", "h_33", "post_norm")`.
    """

    row: int
    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: torch.Tensor
    state_names: tuple[str, ...]

    @property
    def layers(self) -> torch.Tensor:
        """The layers one behind the other: bfloat16 [S, K * H], in memory of its own."""
        return self.states[:, :-1].flatten(1).contiguous()

    @property
    def final(self) -> torch.Tensor:
        """The final state: bfloat16 [S, H], in memory of its own."""
        return self.states[:, -1].contiguous()


@dataclass(frozen=True, slots=True)
class IndexRow:
    """What is known of a row without its states: int32 ids [S] and uint8 mask [S]."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a format may need to write its files that are not one sample's.

    Attributes:
        folder: the export; it exists.
        rows: reads all rows of the export in order, those of other parts (`--shard`) too.
        vocabulary: what is known of the vocabulary.
    """

    folder: Path
    rows: Callable[[], Iterable[IndexRow]]
    vocabulary: Vocabulary


class Format(Protocol):
    """One trainer's files. Stateless; used from several threads at once."""

    @property
    def name(self) -> str:
        """Its name in `hsx.export.FORMATS`."""
        ...

    @property
    def final(self) -> FinalState | None:
        """The final state that it wants; None: as it is stored."""
        ...

    @property
    def layers(self) -> int | None:
        """How many layers it wants besides the final state; None: any number, at least one."""
        ...

    @property
    def layer_shift(self) -> int:
        """What this trainer calls h_k: k minus this. 0 counts states, 1 counts layers by their outputs."""
        ...

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a file, each with its type and shape, in terms of S, K and H."""
        ...

    @property
    def slots(self) -> tuple[str, str]:
        """Where layer number {slot} lies, for people, and where the final state does."""
        ...

    @property
    def maps_vocabulary(self) -> bool:
        """It has a file for the draft's vocabulary."""
        ...

    @property
    def depends_on(self) -> Literal["prompt", "mask", "id"]:
        """What of a sample decides its file: its ids and states alone, its loss mask too, or even its id. For `--link`."""
        ...

    @property
    def has_index(self) -> bool:
        """What lies beside its samples is of use without them: ids and masks of all rows."""
        ...

    @property
    def any_order(self) -> bool:
        """Layers may be taken in any order; without it, in rising order, as servers hand them to the draft."""
        ...

    @property
    def trainer_folder(self) -> str:
        """The folder below the export that the trainer is to be given; "" for the export itself."""
        ...

    def path(self, row: int, part: int) -> str:
        """The file of a row below the export's folder; `part` is the i of `--shard i/n`. Never made of the sample's id."""
        ...

    def unfit(self, row: IndexRow) -> str:
        """Why the trainer cannot take this row, a stable word; "" where it can."""
        ...

    def write(self, file: CheckedFile, sample: Exported) -> None:
        """Writes the file of a sample. Raises OSError."""
        ...

    def prepare(self) -> None:
        """Looks whether all that this format needs is installed. Raises RunError `dependency_missing`."""
        ...

    def finish(self, around: Surroundings) -> list[str]:
        """Writes what lies beside the samples; returns the names, for the manifest. Raises OSError, RunError."""
        ...
