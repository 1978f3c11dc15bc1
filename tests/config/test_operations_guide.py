"""The operator's guide and its pages speak of everything that an operator meets."""

from __future__ import annotations

import re
from pathlib import Path

from hsx.cli import build_parser
from hsx.commands.invariants import keys_of
from hsx.config import Engine, Pipeline, Watchdog
from hsx.config_schema import keys
from hsx.core.invariants import INVARIANTS
from hsx.core.policy import POLICY
from hsx.errors import KINDS
from hsx.events import EVENTS
from hsx.exit_codes import ExitCode
from hsx.metrics import METRICS
from hsx.status import StatusServer
from hsx.telemetry import Telemetry

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_command_is_in_the_guide() -> None:
    commands = set(re.findall(r"^    ([a-z]+)\s", build_parser().format_help(), re.MULTILINE))
    assert {"run", "plan", "verify", "quarantine"} <= commands
    assert [command for command in commands if f"hsx {command} " not in page("operations.md")] == []


def test_every_key_of_the_status_document_is_in_the_guide() -> None:
    document = StatusServer(Telemetry(), dict, "127.0.0.1", 0).document()
    table = page("operations.md").partition("### Status document")[2].partition("###")[0]
    assert [key for key in document if f"`{key}`" not in table] == []


def test_every_name_is_in_its_page() -> None:
    names = page("names.md")
    for table in (KINDS, INVARIANTS, {spec.name: spec for spec in METRICS}):
        assert [name for name in table if f"| `{name}` |" not in names] == []
    assert [name for name in EVENTS if f"### `{name}`" not in page("events.md")] == []
    assert [code.name for code in ExitCode if f"| {code.value} | {code.name} |" not in page("exit-codes.md")] == []
    assert [key for key in keys() if f"| `{key.partition('.')[2]}` |" not in page("job-file.md")] == []


def test_the_guide_speaks_of_no_kind_metric_or_key_that_is_not_there() -> None:
    guide = page("operations.md")
    assert set(re.findall(r"hsx_[a-z_]+(?=`|\{)", guide)) <= {spec.name for spec in METRICS} | set(KINDS)
    stopped = guide.partition("## When it stopped")[2]
    kinds = {
        kind
        for line in stopped.splitlines()
        if line.startswith("| `")
        for kind in re.findall(r"`([a-z_]+)`", line.split("|")[1])
    }
    assert kinds <= set(KINDS)
    assert len(kinds) > 10
    dotted = set(re.findall(r"`((?:pipeline|status|dataset|watchdog|engine|staging)\.[a-z_]+)", guide))
    assert dotted <= {*keys(), *EVENTS}


def test_every_invariant_has_an_entry_that_says_what_fires_it_and_what_to_do() -> None:
    section = page("operations.md").partition("### Invariants\n")[2].partition("### Thresholds")[0]
    entries = dict(re.findall(r"^\*\*`([a-z_]+)`\*\* (proves.*?)(?=\n\n)", section, re.MULTILINE | re.DOTALL))
    assert set(entries) == set(INVARIANTS)
    assert [name for name, text in entries.items() if "Fires " not in text or "Do: " not in text] == []


def test_every_threshold_has_its_default_and_a_reason() -> None:
    section = page("operations.md").partition("### Thresholds\n")[2].partition("###")[0]
    rows = {
        key: (default, why) for key, default, why in re.findall(r"^\| `([a-z_.]+)` \| (\S+) \| (.+) \|$", section, re.MULTILINE)
    }
    sections = {"pipeline": Pipeline(), "watchdog": Watchdog(), "engine": Engine()}
    bearing = {key for name in POLICY for key in keys_of(name)}
    assert set(rows) == bearing
    for key, (default, why) in rows.items():
        kind, _, field = key.partition(".")
        assert float(default) == getattr(sections[kind], field), key
        assert len(why) > 20


def test_links_between_the_pages_lead_somewhere() -> None:
    for name in ("operations.md", "job-file.md", "exit-codes.md", "names.md"):
        for target in re.findall(r"\]\(([^)#]+\.md)", page(name)):
            assert (DOCS / target).exists(), (name, target)


def test_the_readme_names_every_module_and_package() -> None:
    hsx = DOCS.parent / "hsx"
    finder = (DOCS.parent / "README.md").read_text(encoding="utf-8").partition("## Find your way")[2]
    modules = [path.stem for path in hsx.glob("*.py") if not path.stem.startswith("__")]
    assert [name for name in modules if f"`{name}`" not in finder and f"hsx/{name}.py" not in finder] == []
    packages = [path.parent.name for path in hsx.glob("*/__init__.py")]
    assert [name for name in packages if f"[hsx/{name}/](hsx/{name})" not in finder] == []


def test_a_model_served_in_bf16_is_told_its_tolerance() -> None:
    for text in (page("operations.md"), (DOCS.parent / "README.md").read_text(encoding="utf-8")):
        assert "--tolerance 0.1" in text
        assert "bf16" in text
