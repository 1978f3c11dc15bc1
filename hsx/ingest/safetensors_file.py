"""Reads tensors of a safetensors file; every length and offset is checked before anything is believed."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.ingest.protocol import RejectedSampleError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_TYPES: Final = {"BF16": "<u2", "I64": "<i8", "I32": "<i4"}
_MAX_HEADER: Final = 1 << 24


class SafetensorsFile:
    """The header of a file. Raises RejectedSampleError `unreadable` where it is torn, or is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_MAX_HEADER, size - 8):
                    raise RejectedSampleError("unreadable", f"header is {length} bytes of a file of {size}")
                header = json.loads(file.read(length))
            self._start = 8 + length
            self._tensors: dict[str, dict[str, Any]] = {name: about for name, about in header.items() if name != "__metadata__"}
            for name, about in self._tensors.items():
                begin, end = (int(offset) for offset in about["data_offsets"])
                if not 0 <= begin <= end <= size - self._start or not all(type(n) is int and n >= 0 for n in about["shape"]):
                    raise RejectedSampleError(
                        "unreadable", f"tensor {name} is said to lie at {begin} to {end} of {size - self._start}"
                    )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RejectedSampleError("unreadable", f"no safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises RejectedSampleError `missing_key`."""
        return tuple(self._about(name)["shape"])

    def dtype(self, name: str) -> str:
        """Type of a tensor, such as `BF16`. Raises RejectedSampleError `missing_key`."""
        return str(self._about(name)["dtype"])

    def read(self, name: str) -> NDArray[Any]:
        """A tensor, in memory of its own; bfloat16 as uint16.

        Raises RejectedSampleError `missing_key`, `bad_type`, `unreadable`.
        """
        about = self._about(name)
        if about["dtype"] not in _TYPES:
            raise RejectedSampleError("bad_type", f"{name} is {about['dtype']}; expected one of {', '.join(_TYPES)}")
        kind = np.dtype(_TYPES[about["dtype"]])
        shape = tuple(about["shape"])
        begin, end = about["data_offsets"]
        if math.prod(shape) * kind.itemsize != end - begin:
            raise RejectedSampleError("unreadable", f"{name} has {end - begin} bytes; its shape {list(shape)} needs others")
        if begin == end:
            return np.empty(shape, kind)
        try:
            # Not mapped: a file that is cut short meanwhile would end the process with SIGBUS.
            found = np.fromfile(self._path, kind, math.prod(shape), offset=self._start + begin)
        except OSError as error:
            raise RejectedSampleError("unreadable", f"{name} cannot be read: {error}") from error
        if found.size != math.prod(shape):
            raise RejectedSampleError("unreadable", f"{name} ends after {found.nbytes} bytes; expected {end - begin}")
        return found.reshape(shape)

    def _about(self, name: str) -> dict[str, Any]:
        if name not in self._tensors:
            raise RejectedSampleError("missing_key", f"has {', '.join(self._tensors) or 'no tensors'}; expected {name}")
        return self._tensors[name]


def connector_states(path: Path) -> SafetensorsFile:
    """A file of vLLM's connector or of speculators, if its states are bf16. Raises RejectedSampleError."""
    file = SafetensorsFile(path)
    if "hidden_states_scales" in file:
        raise RejectedSampleError("fp8", "states are scaled FP8; expected bfloat16")
    if file.dtype("hidden_states") != "BF16":
        raise RejectedSampleError("bad_type", f"hidden_states is {file.dtype('hidden_states')}; expected BF16")
    return file
