"""speculators: an Arrow dataset of the rows, `hidden_states/hs_<row>.safetensors`, and how often tokens occur."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from hsx.export.arrow import require_pyarrow, write_arrow_dataset
from hsx.export.base import Base
from hsx.export.files import CheckedFile, whole_file, write_safetensors, write_torch
from hsx.export.vocabulary import count_tokens, mapping

if TYPE_CHECKING:
    from hsx.core.spec import FinalState
    from hsx.export.protocol import Exported, Surroundings


class Speculators(Base):
    """Implements `hsx.export.protocol.Format`. The last slot is h_N before the final norm, which the trainer applies itself."""

    name = "speculators"
    final: FinalState | None = "pre_norm"
    layers = None
    layer_shift = 0
    maps_vocabulary = True
    depends_on: Literal["prompt", "mask", "id"] = "prompt"
    has_index = True
    keys: ClassVar = {"token_ids": "int64 [S]", "hidden_states": "bfloat16 [S, K+1, H]"}
    slots = ("hidden_states[:, {slot}]", "hidden_states[:, -1]")

    def path(self, row: int, part: int) -> str:
        """See the protocol."""
        return f"hidden_states/hs_{row}.safetensors"

    def write(self, file: CheckedFile, sample: Exported) -> None:
        """See the protocol."""
        write_safetensors(file, {"token_ids": sample.input_ids, "hidden_states": sample.states}, {})

    def prepare(self) -> None:
        """See the protocol."""
        require_pyarrow()

    def finish(self, around: Surroundings) -> list[str]:
        """The Arrow dataset, `token_freq.pt`, and `d2t-<n>.npy` and `t2d-<n>.npy` where a draft vocabulary is asked for."""
        names = write_arrow_dataset(around.folder, around.rows())
        counts = count_tokens(around.rows())
        with whole_file(around.folder / "token_freq.pt", shared=True) as file:
            write_torch(file, {int(token): int(counts[token]) for token in np.flatnonzero(counts)})  # type: ignore[misc]
        names.append("token_freq.pt")
        if around.vocabulary.draft is not None:
            for key, tensor in mapping(counts, around.vocabulary).items():
                name = f"{key}-{around.vocabulary.draft}.npy"
                buffer = io.BytesIO()
                np.save(buffer, tensor.numpy())
                with whole_file(around.folder / name, shared=True) as file:
                    file.write(buffer.getvalue())
                names.append(name)
        return names


FORMAT = Speculators()
