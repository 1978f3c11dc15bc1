"""The schema and the reference speak of every key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hsx.config_load import decode
from hsx.config_schema import field_texts, keys, reference, schema
from hsx.testing.jobs import job_document

REPOSITORY = Path(__file__).parents[2]


def test_every_key_is_described() -> None:
    described = {(section, name) for section, name in field_texts()}
    missing = [
        f"{section}.{name}"
        for section, definition in schema()["$defs"].items()
        if section != "Config"
        for name in definition["properties"]
        if (section, name) not in described
    ]
    assert missing == []


def test_every_key_is_in_the_reference() -> None:
    text = reference()
    assert len(keys()) > 40
    assert [key for key in keys() if f"| `{key.partition('.')[2]}` |" not in text] == []


def test_the_schema_has_the_descriptions_that_editors_show() -> None:
    definitions = schema()["$defs"]
    assert definitions["Pipeline"]["properties"]["retries"]["description"].startswith("Failures of one sample")
    assert definitions["Root"]["additionalProperties"] is False


def test_the_committed_pages_are_current() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_a_stale_page_is_found_and_named(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/generate_docs.py", "--docs", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    (tmp_path / "names.md").write_text("old", encoding="utf-8")
    run = subprocess.run([*command, "--check"], cwd=REPOSITORY, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (1, "not current: names.md; run scripts/generate_docs.py\n")


def test_the_document_of_the_tests_fits(tmp_path: Path) -> None:
    assert decode(job_document(tmp_path), "job").job.name == "tiny"
