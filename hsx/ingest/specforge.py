"""SpecForge's EAGLE-3 files: `data_<i>.ckpt`, also `.gz`, anywhere below a folder. Loaded with `weights_only=True`."""

from __future__ import annotations

import gzip
import io
from typing import TYPE_CHECKING, Any

import torch

from hsx.ingest.files import files_below
from hsx.ingest.protocol import Entry, Head, RejectedSampleError, checked_ids, checked_mask, number_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsx.core.spec import FinalState

KEYS = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")


class SpecForgeFolder:
    """Implements `hsx.ingest.protocol.Source`."""

    final: FinalState = "post_norm"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> Iterator[Entry]:
        """See the protocol."""
        yield from (Entry(number_of(path), path) for path in files_below(self._folder, (".ckpt", ".ckpt.gz")))

    def head(self, entry: Entry, states: int) -> Head:
        """See the protocol."""
        return _head(_load(entry.file, mapped=True), states)

    def sample(self, entry: Entry, states: int) -> tuple[Head, NDArray[np.uint16]]:
        """See the protocol."""
        raw = _load(entry.file, mapped=False)
        head = _head(raw, states)
        layers = raw["aux_hidden_state"].reshape(-1, states - 1, head.hidden_size)
        joined = torch.cat([layers, raw["hidden_state"].reshape(-1, 1, head.hidden_size)], dim=1)
        return head, joined.contiguous().view(torch.uint16).numpy()


def _head(raw: dict[str, torch.Tensor], states: int) -> Head:
    ids = checked_ids(_row(raw, "input_ids").numpy())
    mask = checked_mask(_row(raw, "loss_mask").numpy(), len(ids))
    final, layers = raw["hidden_state"], raw["aux_hidden_state"]
    for name, tensor in (("hidden_state", final), ("aux_hidden_state", layers)):
        if tensor.dtype != torch.bfloat16:
            raise RejectedSampleError("bad_type", f"{name} is {tensor.dtype}; expected torch.bfloat16")
        if tensor.ndim not in (2, 3) or (tensor.ndim == 3 and len(tensor) != 1) or not tensor.shape[-1]:
            raise RejectedSampleError("bad_shape", f"{name} is {list(tensor.shape)}; expected [1, {len(ids)}, width]")
    width = final.shape[-1]
    for name, tensor, wanted in (("hidden_state", final, width), ("aux_hidden_state", layers, width * (states - 1))):
        if tensor.shape[-1] != wanted:
            raise RejectedSampleError("bad_shape", f"{name} is {list(tensor.shape)}; expected [1, {len(ids)}, {wanted}]")
        if tensor.shape[-2] != len(ids):
            raise RejectedSampleError("tokens_differ", f"{name} is {list(tensor.shape)}; expected [1, {len(ids)}, {wanted}]")
    return Head(ids, mask, states, width)


def _row(raw: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor of one value a token, [S] or [1, S], as [S]: two rows would be two samples.

    Its type is one that numpy has. Raises RejectedSampleError `bad_ids`, `bad_mask`.
    """
    tensor = raw[name]
    if tensor.dtype.is_complex or tensor.dtype == torch.bfloat16 or tensor.ndim not in (1, 2) or tensor.shape[:-1].numel() != 1:
        reason = "bad_ids" if name == "input_ids" else "bad_mask"
        raise RejectedSampleError(reason, f"{name} is {tensor.dtype} {list(tensor.shape)}; expected [S] whole numbers")
    return tensor.reshape(-1)


def _load(path: Path, *, mapped: bool) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                raw: Any = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        else:
            raw = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises all kinds for a file that is torn, and for one that wants more than tensors
        first = next(iter(str(error).splitlines()), "")
        raise RejectedSampleError("unreadable", f"torch.load: {type(error).__name__}: {first}") from error
    if not isinstance(raw, dict):
        raise RejectedSampleError("unreadable", f"holds a {type(raw).__name__}; expected a dictionary")
    for key in KEYS:
        tensor = raw.get(key)
        if not isinstance(tensor, torch.Tensor):
            raise RejectedSampleError("missing_key", f"has no tensor {key}; expected {', '.join(KEYS)}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise RejectedSampleError("bad_type", f"{key} is {tensor.layout} on {tensor.device}; expected an ordinary tensor")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():  # strides of 0 claim any size
            raise RejectedSampleError(
                "bad_shape", f"{key} is {list(tensor.shape)} in {tensor.untyped_storage().nbytes()} bytes; expected all of it"
            )
    return {key: raw[key].detach() for key in KEYS}


def open_folder(folder: Path) -> SpecForgeFolder:
    """The source on a folder."""
    return SpecForgeFolder(folder)
