"""The operator's guide and its pages speak of everything that an operator meets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hsx.cli import build_parser
from hsx.commands.invariants import keys_of
from hsx.config import Engine, Pipeline, Watchdog
from hsx.config_schema import keys
from hsx.core.invariants import INVARIANTS
from hsx.core.policy import POLICY
from hsx.errors import KINDS, HsxError
from hsx.events import EVENTS
from hsx.exit_codes import ExitCode, of_error
from hsx.metrics import METRICS
from hsx.status import StatusServer
from hsx.telemetry import Telemetry

DOCS = Path(__file__).parents[2] / "docs"
HSX = DOCS.parent / "hsx"


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


def rows_of(guide: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    section = guide.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_every_error_kind_has_a_row_with_its_cause_and_what_to_do() -> None:
    guide = page("operations.md")
    ends = rows_of(guide, "Error kinds that end a command")
    others = [row for whose in ("one sample", "a root", "a server") for row in rows_of(guide, f"Error kinds of {whose}")]
    kinds = [row[0].strip("`") for row in [*ends, *others]]
    assert sorted(kinds) == sorted(KINDS)
    for kind, cause, *_, do in [*ends, *others]:
        assert cause == KINDS[kind.strip("`")]
        assert len(do) > 15, kind


def test_every_kind_that_ends_a_command_has_its_exit_code() -> None:
    never = (
        (HSX / "units" / "hsx@.service").read_text(encoding="utf-8").partition("RestartPreventExitStatus=")[2].splitlines()[0]
    )
    for kind, _, code, again, _ in rows_of(page("operations.md"), "Error kinds that end a command"):
        error = HsxError(kind.strip("`"), "message")
        assert int(code) == of_error(error), kind
        assert again == ("no" if code in [*never.split(), "75"] else "yes"), kind


def test_the_guide_speaks_of_no_metric_or_key_that_is_not_there() -> None:
    guide = page("operations.md")
    assert set(re.findall(r"hsx_[a-z_]+(?=`|\{)", guide)) <= {spec.name for spec in METRICS} | set(KINDS)
    sections = "pipeline|status|dataset|watchdog|engine|staging|storage|capture|job|model|log"
    dotted = set(re.findall(rf"`((?:{sections})\.[a-z_]+)", guide))
    files = {"job.toml", "status.schema", "capture.json", "job.lock"}
    assert dotted - files <= {*keys(), *EVENTS}


def blocks(text: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """The text outside of code blocks; and of each block its language and lines."""
    outside, found, language = [], [], None
    for line in text.splitlines():
        if line.startswith("```") and language is None:
            language = line[3:].strip()
            found.append((language, list[str]()))
        elif line.startswith("```"):
            language = None
        elif language is None:
            outside.append(line)
        else:
            found[-1][1].append(line)
    return "\n".join(outside), found


def command_lines(text: str) -> list[list[str]]:
    """The `hsx ...` lines of the blocks of shell commands, without comments, as a shell would split them."""
    shell = [lines for language, lines in blocks(text)[1] if language in ("", "sh", "bash", "console")]
    lines = [line for block in shell for line in "\n".join(block).replace("\\\n", " ").splitlines()]
    parts = [part for line in lines for part in re.split(r"\s(?:&&|\|)\s|;", re.sub(r"(^|\s)#.*", "", line))]
    return [shlex.split(part)[1:] for part in parts if re.match(r"\s*(\S*/)?hsx\s", part)]


def inline_commands(text: str) -> list[list[str]]:
    """The `hsx ...` commands within sentences that say with what they are called: those with a job."""
    calls = (call.replace("\n", " ") for call in re.findall(r"`hsx ([^`]+)`", blocks(text)[0]))
    return [shlex.split(call) for call in calls if re.search(r"job\.toml|\bJOB\b", call)]


STANDS_FOR = {
    "FORMAT": "specforge",
    "KIND": "specforge",
    "SAMPLE": "17",
    "INDEX": "17",
    "INDEX...": "17",
    "N": "4",
    "E": "0.1",
    "FILE": "a",
    "MODEL": "m",
    "UUID": "u",
}


def as_called(words: list[str]) -> list[str]:
    """Options in brackets as if they were given, placeholders as what may stand there; without what is the server's."""
    words = [word.strip("[],") for word in words]
    words = words[: words.index("--")] if "--" in words else words
    return [STANDS_FOR.get(word, "1000" if word == "TOKENS_PER_S" else word) for word in words if word]


def test_every_command_line_of_the_documents_is_one_that_hsx_takes() -> None:
    pages = [DOCS.parent / "README.md", DOCS.parent / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
    parser, seen = build_parser(), 0
    for path in pages:
        text = path.read_text(encoding="utf-8")
        for words in [*command_lines(text), *inline_commands(text)]:
            if words == ["--version"]:
                continue
            try:
                parser.parse_args(as_called(words))
            except SystemExit:
                raise AssertionError(f"{path.name}: hsx {shlex.join(words)}") from None
            seen += 1
    assert seen > 60


def test_each_command_of_the_table_is_one_that_hsx_takes() -> None:
    table = page("operations.md").partition("\n## Commands\n")[2].partition("\n## ")[0]
    commands = [
        shlex.split(c) for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for c in re.findall(r"`hsx ([^`]+)`", row)
    ]
    assert len(commands) > 18
    for words in commands:
        build_parser().parse_args(as_called(words))


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
