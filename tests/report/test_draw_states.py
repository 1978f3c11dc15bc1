"""Drawing states: bounded by chunks, the same for the same seed, and at ease with any bits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.report.figures import channels, heat_map, norms
from hsx.report.state_facts import COLUMNS, squeezed, state_facts
from hsx.report.states import CHUNKS, draw_states, memory_bound
from hsx.stores.reader import Store
from hsx.testing.stores import build_store, random_bits, random_states

if TYPE_CHECKING:
    from pathlib import Path


def test_of_a_long_sample_the_first_chunk_and_a_few_others_are_read(tmp_path: Path) -> None:
    built = build_store(tmp_path, [random_states(np.random.default_rng(i), 64 * 40 + 7, 3, 16) for i in range(2)])
    store = Store(built.info.path)
    drawn = draw_states(store, 2, 0)
    assert drawn.nbytes <= 2 * CHUNKS * store.info.layout.chunk_bytes
    assert drawn.nbytes >= 2 * ((CHUNKS - 2) * 64 + 7) * store.info.layout.token_bytes
    assert len(drawn.norms) == drawn.nbytes // store.info.layout.token_bytes - 2
    expected = np.linalg.norm((built.states[0][0].astype(np.uint32) << 16).view(np.float32), axis=1)
    np.testing.assert_allclose(drawn.first[drawn.samples.index(0)], expected, rtol=1e-5)
    longer = build_store(_folder(tmp_path), [random_states(np.random.default_rng(0), 64 * 80, 3, 16)])
    assert memory_bound(Store(longer.info.path), 8) == memory_bound(store, 8)


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_of_fewer_tokens_those_that_are_stored_are_read(tmp_path: Path, chunk_tokens: int) -> None:
    states = [random_states(np.random.default_rng(i), 300, 3, 16) for i in range(3)]
    stored = [np.r_[0, 100:140], np.r_[70:200:7, 299], np.array([299])]
    masks = [np.isin(np.arange(300), tokens).astype(np.uint8) for tokens in stored]
    built = build_store(tmp_path, states, masks=masks, kept="loss", chunk_tokens=chunk_tokens)
    store = Store(built.info.path)
    drawn = draw_states(store, 3, 0)
    assert drawn.unreadable == []
    truth = [
        np.linalg.norm((s[t].astype(np.uint32) << 16).view(np.float32), axis=2) for s, t in zip(states, stored, strict=True)
    ]
    np.testing.assert_allclose(drawn.first, truth[0][:1], rtol=1e-5)  # of the others, the first token is not there
    rows = np.concatenate([truth[index][1:] if index == 0 else truth[index] for index in drawn.samples])
    np.testing.assert_allclose(drawn.norms, rows, rtol=1e-5)
    assert {heat.index: (heat.tokens, heat.stored) for heat in drawn.heats} == {0: (300, 41), 1: (300, 20), 2: (300, 1)}
    for heat in drawn.heats:
        np.testing.assert_allclose(heat.norms, truth[heat.index], rtol=1e-5)
    facts = state_facts(drawn, store, 3, 0, 0)["heats"]
    assert [(heat["stored"], heat["shown"]) for heat in facts] == [(heat.stored, heat.stored) for heat in drawn.heats]
    assert "stored token" in heat_map(0, facts[0], drawn.names, 1.0)


def test_any_bits_can_be_described(tmp_path: Path) -> None:
    built = build_store(tmp_path, [random_bits(np.random.default_rng(i), 50, 3, 16) for i in range(3)])
    store = Store(built.info.path)
    drawn = draw_states(store, 3, 0)
    facts = state_facts(drawn, store, 3, 0, 0)
    assert facts["not_finite"] > 0
    assert facts["rows"] + facts["not_finite"] + len(drawn.first) == 150
    assert np.isfinite(drawn.norms).all()
    assert len(json.dumps(facts, allow_nan=False)) > 1000
    assert "<svg" in norms(drawn)
    assert "<svg" in channels(drawn, facts["layers"])


def test_a_column_shows_the_token_farthest_from_the_median() -> None:
    values = np.zeros((COLUMNS * 3, 2))
    values[4] = (-5.0, 1.0)
    values[5] = (4.0, 2.0)
    found = squeezed(values)
    assert found.shape == (COLUMNS, 2)
    assert found[1].tolist() == [-5.0, 2.0]
    assert np.count_nonzero(found) == 2


def _folder(path: Path) -> Path:
    folder = path / "longer"
    folder.mkdir()
    return folder
