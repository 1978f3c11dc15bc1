"""Grafana's board: Prometheus parses each expression in it, it speaks of metrics that exist, and none of them is forgotten."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hsx.metrics import METRICS
from hsx.testing.prometheus import obstacle, promtool

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "hsx.json").read_text(encoding="utf-8"))
RULES = (ROOT / "deploy" / "prometheus" / "hsx-rules.yml").read_text(encoding="utf-8")
METRIC = re.compile(r"\bhsx_[a-z_]+\b")


def expressions(part: object = BOARD) -> Iterator[str]:
    """Every expression of the board, and of its annotations."""
    if isinstance(part, dict):
        if "expr" in part:
            yield part["expr"]
        for value in part.values():
            yield from expressions(value)
    elif isinstance(part, list):
        for value in part:
            yield from expressions(value)


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_every_expression_is_one(tmp_path: Path) -> None:
    found = list(expressions())
    assert len(found) > 20
    # Grafana puts names in for its variables. A rule may hold any expression, so promtool's check of rules parses them.
    rules = [{"record": f"board:{number}", "expr": text} for number, text in enumerate(found)]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    code, said = promtool("check", "rules", tmp_path / "rules.json")
    assert (code, f"{len(found)} rules found" in said) == (0, True), said
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "x", "rules": [{"record": "x", "expr": "sum(("}]}]}))
    assert promtool("check", "rules", tmp_path / "rules.json")[0] != 0


def test_every_metric_exists_and_each_is_on_the_board_or_in_a_rule() -> None:
    exported = {spec.name for spec in METRICS}
    shown = {name for text in expressions() for name in METRIC.findall(text)}
    ruled = set(METRIC.findall("".join(line for line in RULES.splitlines(keepends=True) if "hsx_" in line)))
    assert shown - exported == set()
    assert exported - shown - ruled == set()


def test_labels_in_legends_are_those_of_the_metrics() -> None:
    labels = {spec.name: spec.label for spec in METRICS}
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            own = {labels[name] for name in METRIC.findall(target["expr"])} | {"instance"}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= own, panel["title"]


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    identities = [panel["id"] for panel in BOARD["panels"]]
    assert len(identities) == len(set(identities))
