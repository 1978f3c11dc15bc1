"""Reads tensors of a safetensors file; every length and offset is checked before anything is believed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.ingest.protocol import RejectedSampleError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_TYPES: Final = {"BF16": "<u2", "I64": "<i8", "I32": "<i4"}
_MAX_HEADER: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: bytes `begin` up to `end` behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """The header of a file. Raises RejectedSampleError `unreadable` where it is torn, or is none.

    As in the format's own reader, the tensors lie one behind the other from the first byte behind the header to the file's
    last: no two share a byte, and none is over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_MAX_HEADER, size - 8):
                    raise RejectedSampleError("unreadable", f"header is {length} bytes of a file of {size}")
                header = json.loads(file.read(length), object_pairs_hook=_once)
            self._start = 8 + length
            self._tensors = {name: _place(name, about) for name, about in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RejectedSampleError("unreadable", f"no safetensors file: {type(error).__name__}: {error}") from error
        at = 0
        for name, place in sorted(self._tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if place.begin != at:
                raise RejectedSampleError("unreadable", f"tensor {name} begins at byte {place.begin}; expected {at}")
            at = place.end
        if at != size - self._start:
            raise RejectedSampleError("unreadable", f"tensors end at byte {at}, the file at {size - self._start}")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises RejectedSampleError `missing_key`."""
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        """Type of a tensor, such as `BF16`. Raises RejectedSampleError `missing_key`."""
        return self._find(name).dtype

    def read(self, name: str) -> NDArray[Any]:
        """A tensor, in memory of its own; bfloat16 as uint16.

        Raises RejectedSampleError `missing_key`, `bad_type`, `unreadable`.
        """
        place = self._find(name)
        if place.dtype not in _TYPES:
            raise RejectedSampleError("bad_type", f"{name} is {place.dtype}; expected one of {', '.join(_TYPES)}")
        kind = np.dtype(_TYPES[place.dtype])
        shape, begin, end = place.shape, place.begin, place.end
        if math.prod(shape) * kind.itemsize != end - begin:
            raise RejectedSampleError("unreadable", f"{name} has {end - begin} bytes; its shape {list(shape)} needs others")
        try:
            if begin == end:
                return np.empty(shape, kind)
            # Not mapped: a file that is cut short meanwhile would end the process with SIGBUS.
            found = np.fromfile(self._path, kind, math.prod(shape), offset=self._start + begin)
        except (OSError, ValueError, OverflowError) as error:
            raise RejectedSampleError("unreadable", f"{name} cannot be read: {error}") from error
        if found.size != math.prod(shape):
            raise RejectedSampleError("unreadable", f"{name} ends after {found.nbytes} bytes; expected {end - begin}")
        return found.reshape(shape)

    def _find(self, name: str) -> _Place:
        if name not in self._tensors:
            raise RejectedSampleError("missing_key", f"has {', '.join(self._tensors) or 'no tensors'}; expected {name}")
        return self._tensors[name]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the header. Of two entries of one name, readers take either."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _place(name: str, about: Any) -> _Place:  # noqa: ANN401 - JSON of somebody else
    dtype, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
    numbers = [begin, end, *shape]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"tensor {name} is said to be {dtype!r} {shape!r} at {begin!r} to {end!r}")
    return _Place(dtype, tuple(shape), begin, end)


def connector_states(path: Path) -> SafetensorsFile:
    """A file of vLLM's connector or of speculators, if its states are bf16. Raises RejectedSampleError."""
    file = SafetensorsFile(path)
    if "hidden_states_scales" in file:
        raise RejectedSampleError("fp8", "states are scaled FP8; expected bfloat16")
    if file.dtype("hidden_states") != "BF16":
        raise RejectedSampleError("bad_type", f"hidden_states is {file.dtype('hidden_states')}; expected BF16")
    return file
