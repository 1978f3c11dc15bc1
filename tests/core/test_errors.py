"""Error kinds: what is raised is registered, and what is registered is raised."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hsx.errors import KINDS, ConfigError, EngineError, HsxError, RunError, SampleError

HSX = Path(__file__).parents[2] / "hsx"
CLASSES = {"HsxError", "SampleError", "EngineError", "RunError", "ConfigError", "ShardError"}


def raised_kinds() -> dict[str, str]:
    """Kinds given as the first argument of an error, with a file that does so."""
    found: dict[str, str] = {}
    for path in sorted(HSX.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
                continue
            first = node.args[0]
            choices = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
            if node.func.id in CLASSES - {"ShardError"}:
                for choice in choices:
                    if isinstance(choice, ast.Constant) and isinstance(choice.value, str):
                        found[choice.value] = str(path.relative_to(HSX))
    return found


def strings() -> set[str]:
    """All text constants of hsx, but those of errors.py, docs and tables of kinds."""
    tables = {HSX / "errors.py", HSX / "exit_codes.py"}
    return {
        node.value
        for path in HSX.rglob("*.py")
        if path not in tables
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_kind_that_is_raised_is_registered() -> None:
    unknown = {kind: path for kind, path in raised_kinds().items() if kind not in KINDS}
    assert unknown == {}
    assert len(raised_kinds()) > 20


def test_every_registered_kind_is_used() -> None:
    used = strings()
    assert [kind for kind in KINDS if kind not in used] == []


def test_every_kind_has_a_meaning() -> None:
    assert [kind for kind, meaning in KINDS.items() if len(meaning) < 10 or meaning.endswith(".")] == []


@pytest.mark.parametrize("error", [HsxError, SampleError, EngineError, RunError])
def test_an_unregistered_kind_is_a_fault_of_the_program(error: type[HsxError]) -> None:
    with pytest.raises(ValueError, match="unknown error kind 'nonsense'"):
        error("nonsense", "text")


def test_an_error_shows_its_kind_and_message() -> None:
    error = RunError("usage", "said so")
    assert (str(error), error.kind, error.message) == ("[usage] said so", "usage", "said so")


def test_a_config_error_keeps_its_problems_apart() -> None:
    error = ConfigError("config_invalid", ["one", "two"])
    assert (error.problems, error.message) == (["one", "two"], "one\ntwo")
    assert isinstance(error, RunError)
