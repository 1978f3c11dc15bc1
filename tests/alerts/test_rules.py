"""The alert rules: sound to promtool, tested one by one, and about metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hsx.metrics import METRICS
from hsx.testing.prometheus import faster, obstacle, promtool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "hsx-rules.yml"
CASES = RULES.with_name("hsx-rules.test.yml")
SCRAPE = RULES.with_name("hsx-scrape.yml")
GUIDE = ROOT / "docs" / "operations.md"

with_promtool = pytest.mark.skipif(bool(obstacle()), reason=obstacle())


def alerts() -> dict[str, str]:
    """The text of each rule by its alert's name."""
    _, *parts = RULES.read_text(encoding="utf-8").split("- alert: ")
    return {part.partition("\n")[0]: part for part in parts}


@with_promtool
def test_promtool_finds_the_rules_sound() -> None:
    code, said = promtool("check", "rules", RULES)
    assert (code, f"{len(alerts())} rules found" in said) == (0, True), said


@with_promtool
def test_promtool_passes_every_case() -> None:
    code, said = promtool("test", "rules", CASES)
    assert (code, "SUCCESS" in said) == (0, True), said


@with_promtool
def test_promtool_would_not_pass_a_wrong_case(tmp_path: Path) -> None:
    (tmp_path / RULES.name).write_text(RULES.read_text().replace("hsx_sound == 0", "hsx_sound == 1"))
    (tmp_path / CASES.name).write_text(CASES.read_text())
    code, said = promtool("test", "rules", tmp_path / CASES.name)
    assert code != 0
    assert "HsxUnsound" in said


@with_promtool
def test_the_scrape_settings_are_sound(tmp_path: Path) -> None:
    indented = "".join(f"  {line}\n" for line in SCRAPE.read_text(encoding="utf-8").splitlines())
    config = tmp_path / "prometheus.yml"
    config.write_text(f"rule_files: [{RULES}]\nscrape_configs:\n{indented}", encoding="utf-8")
    code, said = promtool("check", "config", config)
    assert (code, f"{len(alerts())} rules found" in said) == (0, True), said


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    text = CASES.read_text(encoding="utf-8")
    quiet = set(re.findall(r"alertname: (\w+), eval_time: \w+, exp_alerts: \[\]", text))
    fires = set(re.findall(r"- alertname: (\w+)\n\s+eval_time: \w+\n\s+exp_alerts:\n\s+- exp_labels", text))
    assert fires == quiet == set(alerts())


def test_every_alert_says_what_to_do_and_where_that_is_explained() -> None:
    section = GUIDE.read_text(encoding="utf-8").partition("\n## Alerts\n")[2].partition("\n## ")[0]
    for name, rule in alerts().items():
        assert re.search(r"severity: (page|ticket)\n", rule), name
        assert re.search(r"\n          description: .{30,}\n", rule), name
        assert f"runbook_url: docs/operations.md#alert-{name.lower()}\n" in rule, name
        entry = section.partition(f"#### Alert {name}\n")[2].partition("#### ")[0]
        assert len(entry) > 60, name
    assert set(re.findall(r"#### Alert (\w+)", section)) == set(alerts())


def test_the_rules_speak_of_metrics_that_exist() -> None:
    named = {name for rule in alerts().values() for name in re.findall(r"hsx_[a-z_]+", rule.partition("labels:")[0])}
    assert named <= {spec.name for spec in METRICS}
    assert len(named) > 10


def test_durations_are_divided_and_nothing_else() -> None:
    text = "increase(x[10m]) - x offset 6h > 3600\nfor: 45m\nsummary: for 20 minutes"
    assert faster(text, 90) == "increase(x[6667ms]) - x offset 240000ms > 3600\nfor: 30000ms\nsummary: for 20 minutes"
