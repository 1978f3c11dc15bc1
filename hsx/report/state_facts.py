"""The drawn states in numbers: what the page prints of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsx.report.states import DrawnStates, Heat
    from hsx.stores.reader import Store

QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
CHANNELS: Final = 5
"""Channels of each state that are named: the largest ones."""
OUTLIER: Final = 10.0
"""A channel with at least so many times the median root mean square of its state is counted as an outlier."""
COLUMNS: Final = 512
"""Columns of a heat map at most."""


def state_facts(drawn: DrawnStates, store: Store, samples: int, seed: int, memory: int) -> dict[str, Any]:
    """Plain data on what was drawn; `layers` is empty where no sample could be read."""
    return {
        "asked": samples,
        "seed": seed,
        "read": len(drawn.samples),
        "drawn": drawn.samples,
        "rows": len(drawn.norms),
        "bytes": drawn.nbytes,
        "memory_bound": memory,
        "not_finite": drawn.not_finite,
        "unreadable": [
            {"index": one.index, "id": store.sample_id(one.index), "kind": one.kind, "message": one.message}
            for one in drawn.unreadable
        ],
        "layers": [_layer(drawn, at) for at in range(len(drawn.names))] if drawn.samples else [],
        "heats": [_heat_facts(heat, store) for heat in drawn.heats],
    }


def _layer(drawn: DrawnStates, at: int) -> dict[str, Any]:
    norms, first = drawn.norms[:, at], drawn.first[:, at]
    rms = np.sqrt(drawn.mean_square[at])
    middle = float(np.median(rms))
    order = np.argsort(-rms, kind="stable")[:CHANNELS]
    return {
        "name": drawn.names[at],
        "norm": None if not len(norms) else {f"p{100 * share:g}": float(np.quantile(norms, share)) for share in QUANTILES},
        "largest": float(norms.max()) if len(norms) else None,
        "first": float(np.median(first)) if len(first) else None,
        "median_rms": middle,
        "outliers": int((rms >= OUTLIER * middle).sum()) if middle > 0 else 0,
        "channels": [
            {
                "channel": int(channel),
                "rms": float(rms[channel]),
                "ratio": float(rms[channel]) / middle if middle > 0 else None,
                "largest": float(drawn.largest[at, channel]),
            }
            for channel in order
        ],
    }


def _heat_facts(heat: Heat, store: Store) -> dict[str, Any]:
    values, middles = relative(heat.norms)
    columns = squeezed(values)
    return {
        "index": heat.index,
        "id": store.sample_id(heat.index),
        "tokens": heat.tokens,
        "stored": heat.stored,
        "shown": len(heat.norms),
        "medians": [float(middle) for middle in middles],
        "first": [float(norm) for norm in heat.norms[0]],
        "columns": [[round(float(value), 3) for value in column] for column in columns],
        "tokens_per_column": -(-len(values) // COLUMNS),
    }


def relative(norms: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """log2 of each norm over its state's median [tokens, L], and the medians [L], without the first token where there are more.

    The first token of a prompt is an attention sink with a norm hundreds of times that of others: it is no measure for them.
    A norm that is no positive number counts as the median.
    """
    values = norms.astype(np.float64)
    middles = np.median(values[1:] if len(values) > 1 else values, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log2(values / middles)
    return np.where(np.isfinite(found), found, 0.0), middles


def squeezed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """At most `COLUMNS` rows of [tokens, L]: of each group of tokens, per state, the value farthest from 0."""
    size = -(-len(values) // COLUMNS)
    if size <= 1:
        return values
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    return np.stack([np.take_along_axis(group, np.abs(group).argmax(axis=0)[None], axis=0)[0] for group in groups])
