"""Small stores as exports want them: with masks, and with a final norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsx.core.spec import CaptureSpec
from hsx.stores.group import record_final_norm
from hsx.testing.stores import BuiltStore, build_store, random_states

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.spec import FinalState

LENGTHS = (5, 64, 65, 130, 33)
LAYERS = (2, 4, 7)
WIDTH = 32
VOCAB = 300
EPS = 1e-5


@dataclass(frozen=True)
class Truth:
    """What went into a store.

    Attributes:
        built: the store, its states and ids.
        masks: uint8 [tokens] of each sample.
        weight: of the final norm, float32 [H]; its eps is `EPS`.
    """

    built: BuiltStore
    masks: list[NDArray[np.uint8]]
    weight: NDArray[np.float32]

    @property
    def path(self) -> Path:
        """The store."""
        return self.built.info.path


def exportable_store(
    folder: Path,
    final: FinalState,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    layers: tuple[int, ...] = LAYERS,
    norm: bool = True,
    committed: int | None = None,
    twins: Mapping[int, int] | None = None,
    **how: Any,  # noqa: ANN401 - passed on
) -> Truth:
    """A store `folder/store` whose masks are 0 for the first third of each sample, and 1 for the rest but every fifth token.

    Args:
        folder: made where it is missing.
        final: the kind of final state.
        lengths: tokens of each sample.
        layers: the k of its layers.
        norm: record a final norm.
        committed: only the first so many samples are committed; default: all.
        how: further arguments for `build_store`, such as `names`.
        twins: samples that have the prompt, and share the shard, of another one of their length.
    """
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    states = [random_states(rng, tokens, len(layers) + 1, WIDTH) for tokens in lengths]
    ids = [rng.zipf(1.3, tokens).astype(np.int64) % VOCAB for tokens in lengths]
    masks = [((np.arange(tokens) >= tokens // 3) & (np.arange(tokens) % 5 != 0)).astype(np.uint8) for tokens in lengths]
    for twin, first in (twins or {}).items():
        ids[twin], states[twin] = ids[first], states[first]
    built = build_store(
        folder,
        states,
        input_ids=[sample.astype(np.int32) for sample in ids],
        masks=masks,
        spec=CaptureSpec(layers, final),
        committed=committed,
        **how,
    )
    roots = {root.name: root for root in built.roots}
    for twin, first in (twins or {}).items():
        built.view.unlink(twin)
        roots[built.rows[twin].root].discard(twin)
        home = built.rows[first].root
        assert roots[home].link(first, [twin]) == [twin]
        built.view.link(twin, home)
    weight = rng.uniform(0.5, 2, WIDTH).astype(np.float32)
    if norm:
        record_final_norm(built.info.path, weight, EPS)
    return Truth(built, masks, weight)
