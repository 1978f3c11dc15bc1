"""What `hsx report` says is what the store and the ledger have."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hsx.testing.kept_job import SAMPLES, KeptJob, keep_job
from hsx.testing.left_job import leave_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

TOKENS = SAMPLES * (SAMPLES + 1) // 2


def sentences(document: dict[str, Any]) -> list[str]:
    """The findings, with their levels."""
    return [f"{found['level']}: {found['text']}" for found in document["findings"]]


@pytest.fixture
def job(tmp_path: Path) -> KeptJob:
    """All twelve samples are committed."""
    kept = keep_job(tmp_path)
    kept.extract()
    return kept


def truth(kept: KeptJob, index: int) -> NDArray[np.float64]:
    """float64 [tokens, L, H]."""
    return (kept.truth(index).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def norms(kept: KeptJob, index: int) -> NDArray[np.float64]:
    return np.asarray(np.linalg.norm(truth(kept, index), axis=2))


def test_states_are_described_as_they_are(job: KeptJob, document: Callable[..., Any]) -> None:
    states = document(job.file)["states"]
    assert sorted(states["drawn"]) == list(range(SAMPLES))
    rest = np.concatenate([norms(job, index)[1:] for index in range(SAMPLES)])
    values = np.concatenate([truth(job, index)[1:] for index in range(SAMPLES)])
    firsts = np.stack([norms(job, index)[0] for index in range(SAMPLES)])
    assert states["rows"] == len(rest) == TOKENS - SAMPLES
    assert (states["unreadable"], states["not_finite"]) == ([], 0)
    assert [layer["name"] for layer in states["layers"]] == ["h_1", "h_3", "post_norm"]
    for at, layer in enumerate(states["layers"]):
        for name, share in (("p1", 0.01), ("p50", 0.5), ("p99", 0.99)):
            assert layer["norm"][name] == pytest.approx(np.quantile(rest[:, at], share), rel=1e-5)
        assert layer["largest"] == pytest.approx(rest[:, at].max(), rel=1e-5)
        assert layer["first"] == pytest.approx(np.median(firsts[:, at]), rel=1e-5)
        rms = np.sqrt(np.square(values[:, at]).mean(axis=0))
        order = np.argsort(-rms)[:5]
        assert [one["channel"] for one in layer["channels"]] == order.tolist()
        assert [one["rms"] for one in layer["channels"]] == pytest.approx(rms[order])
        assert [one["largest"] for one in layer["channels"]] == pytest.approx(np.abs(values[:, at]).max(axis=0)[order])
        assert layer["channels"][0]["ratio"] == pytest.approx(rms.max() / np.median(rms))


def test_heat_maps_have_each_token_over_the_median_of_the_others(job: KeptJob, document: Callable[..., Any]) -> None:
    heats = document(job.file)["states"]["heats"]
    assert [heat["tokens"] for heat in heats] == [2, 5, 8, 11]
    for heat in heats:
        rows = norms(job, heat["index"])
        expected = np.log2(rows / np.median(rows[1:], axis=0))
        np.testing.assert_allclose(np.array(heat["columns"]), expected, atol=1e-3)
        assert heat["first"] == pytest.approx(rows[0], rel=1e-5)


def test_roots_lengths_and_totals_are_those_of_the_disks_and_the_dataset(job: KeptJob, report: Callable[..., Any]) -> None:
    page = report(job.file)
    found = page.document()
    sizes = {name: [job.shard(i).stat().st_size for i in range(SAMPLES) if i % 2 == at] for at, name in enumerate("ab")}
    for root in found["roots"]:
        assert (root["there"], root["samples"], root["bytes"]) == (True, SAMPLES // 2, sum(sizes[root["name"]]))
        assert 0 < root["free"] <= root["size"]
    shown = {a["data-root"]: (a["data-samples"], a["data-bytes"]) for _, a in page.elements if "data-root" in a}
    assert shown == {name: (str(len(nbytes)), str(sum(nbytes))) for name, nbytes in sizes.items()}
    lengths = found["lengths"]
    assert (lengths["samples"], lengths["tokens"], lengths["width"]) == (SAMPLES, TOKENS, 1)
    assert lengths["bins"] == {"committed": [1] * SAMPLES, "pending": [0] * SAMPLES, "quarantined": [0] * SAMPLES}
    assert (lengths["shortest"], lengths["p50"], lengths["p99"], lengths["longest"]) == (1, 6, 12, 12)
    values = page.values()
    assert (values["committed"], values["tokens"], values["bytes"]) == ("12", str(TOKENS), str(sum(map(sum, sizes.values()))))
    assert found["state"] == "finished"
    assert "good" in [a.get("class") for tag, a in page.elements if tag == "li"]
    assert "All 12 samples are committed." in page.text


def test_the_timeline_and_the_lives_are_those_of_the_ledger(job: KeptJob, document: Callable[..., Any]) -> None:
    with closing(sqlite3.connect(job.ledger)) as db:
        db.execute("UPDATE samples SET committed_at = 1000 + 100 * idx, epoch = CASE WHEN idx < 8 THEN 'e1' ELSE 'e2' END")
        db.execute(
            "INSERT INTO epochs (epoch, began, ended, reason, evidence, record, requeued, vouched) "
            "VALUES ('e1', 990, 1750, 'alive', 'killed', '{}', '[8, 9]', 5)"
        )
        db.execute("INSERT INTO epochs (epoch, began, record, vouched) VALUES ('e2', 1760, '{}', 12)")
        db.commit()
    found = document(job.file)
    timeline = found["timeline"]
    assert (timeline["began"], timeline["ended"], timeline["step"], timeline["undated"]) == (990, 2100, 60, 0)
    slices = [(entry["number"], entry["samples"], entry["tokens"]) for entry in timeline["slices"]]
    expected = Counter((10 + 100 * i) // 60 for i in range(SAMPLES))
    tokens = {number: sum(i + 1 for i in range(SAMPLES) if (10 + 100 * i) // 60 == number) for number in expected}
    assert slices == [(number, expected[number], tokens[number]) for number in sorted(expected)]
    lives = found["lives"]
    assert (lives["servers"], lives["ended"], lives["requeued"], lives["ends"]) == (2, 1, 2, [1750])
    assert [(life["epoch"], life["committed"], life["unvouched"]) for life in lives["last"]] == [("e1", 8, 3), ("e2", 4, 0)]
    assert (found["canaries"]["vouched"], found["canaries"]["unvouched"]) == (9, 3)


def test_what_was_given_up_is_named_with_its_reason(tmp_path: Path, document: Callable[..., Any]) -> None:
    found = document(leave_job(tmp_path).file)
    assert found["state"] == "unfinished"
    assert found["quarantine"]["by_reason"] == {"finite": 1}
    (row,) = found["quarantine"]["first"]
    assert (row["index"], row["id"], row["tokens"], row["reason"], row["evidence"]) == (
        3,
        "row-3",
        4,
        "finite",
        "4 values are NaN",
    )
    assert found["failures"] == {"finite": 1}
    assert found["lengths"]["bins"]["quarantined"] == [0, 0, 0, 1, 0]
    assert found["lengths"]["bins"]["pending"] == [0, 0, 0, 0, 1]
    assert "warn: 1 of 5 samples are quarantined: they are not in the store." in sentences(found)


def test_the_draw_is_the_seeds(job: KeptJob, document: Callable[..., Any]) -> None:
    first, again, other = (document(job.file, 4, seed)["states"] for seed in (1, 1, 2))
    assert first == again
    assert len(set(first["drawn"])) == first["read"] == first["asked"] == 4
    assert first["drawn"] != other["drawn"]
    assert (first["seed"], other["seed"]) == (1, 2)
