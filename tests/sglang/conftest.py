"""Fixtures: the SGLang environments, the models, and Hugging Face in float32 as the judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hsx.core.marker import Marker
from hsx.testing import tiny_models
from hsx.testing.huggingface import HuggingFace, relative_error
from hsx.testing.sglang_job import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

RUN = "5e1f0a2b"


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    return interpreter()


@pytest.fixture(scope="session")
def sglang_python_0518() -> Path:
    return interpreter("0.5.18", "HSX_SGLANG_PYTHON_0518")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tiny_models.Kind], Path]:
    made: dict[str, Path] = {}

    def make(kind: tiny_models.Kind) -> Path:
        if kind not in made:
            made[kind] = tiny_models.make(kind, tmp_path_factory.mktemp("models") / kind)
        return made[kind]

    return make


def draw_samples(count: int, longest: int, vocabulary: int, skew: int) -> dict[Marker, NDArray[np.int32]]:
    """`count` prompts of 1 to `longest` tokens, both included; the larger `skew`, the more short ones."""
    rng = np.random.default_rng(2026)
    lengths = [1 + round((longest - 1) * (i / (count - 1)) ** skew) for i in range(count)]
    order = rng.permutation(count)
    return {Marker(RUN, int(i), 1, lengths[i]): rng.integers(5, vocabulary, lengths[i]).astype(np.int32) for i in order}


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Judge:
    """Compares dumps with Hugging Face, and keeps the worst figures seen.

    Attributes:
        worst_capture: largest relative error of a token before rounding.
        worst_stored: the same of the bf16 dump.
        nearest: smallest relative distance of a token to the same token one layer before or after.
        nearest_ratio: smallest such distance in units of that token's own error.
        near: how many such distances are under 1e-3, and
        looked: how many there are.
    """

    def __init__(self, huggingface: HuggingFace, layers: Sequence[int], final: str) -> None:
        self._huggingface = huggingface
        self._layers = tuple(layers)
        self._final = final
        self.worst_capture = self.worst_stored = 0.0
        self.nearest = self.nearest_ratio = np.inf
        self.near = self.looked = 0
        # On a busy machine threads that wait for each other cost more than they bring.
        torch.set_num_threads(1)

    def look(self, ids: NDArray[np.int32], captured: NDArray[np.float32], stored: NDArray[np.uint16]) -> None:
        """Takes note of one sample: `captured` before rounding and `stored` bits, both [tokens, L, H]."""
        all_states = self._huggingface.states(ids)
        last = len(all_states) - 1
        for slot, k in enumerate((*self._layers, last if self._final == "post_norm" else last - 1)):
            own = relative_error(captured[:, slot], all_states[k])
            self.worst_capture = max(self.worst_capture, float(own.max()))
            self.worst_stored = max(self.worst_stored, float(relative_error(widen(stored[:, slot]), all_states[k]).max()))
            for other in (k - 1, k + 1):
                if 0 <= other <= last:
                    missed = relative_error(captured[:, slot], all_states[other])
                    self.nearest = min(self.nearest, float(missed.min()))
                    self.nearest_ratio = min(self.nearest_ratio, float((missed / np.maximum(own, 1e-7)).min()))
                    self.near += int((missed < 1e-3).sum())
                    self.looked += len(missed)

    def __str__(self) -> str:
        return (
            f"worst before rounding {self.worst_capture:.2e}, stored {self.worst_stored:.2e}; nearest neighbouring layer "
            f"{self.nearest:.2e}, {self.nearest_ratio:.0f} times the token's own error, {self.near} of {self.looked} under 1e-3"
        )


@pytest.fixture(scope="session")
def judge() -> Callable[[Path, Sequence[int], str], Judge]:
    return lambda folder, layers, final: Judge(HuggingFace(folder), layers, final)


@pytest.fixture(scope="session")
def samples() -> Callable[[int, int, int, int], dict[Marker, NDArray[np.int32]]]:
    return draw_samples
