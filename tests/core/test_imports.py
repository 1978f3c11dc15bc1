"""Imports point one way: cli → app → pipeline and its like → ports → core → errors; adapters never import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

HSX = Path(__file__).parents[2] / "hsx"
ADAPTERS = ("datasets", "engines", "dumps", "stores", "export", "ingest")
LIGHT_FOR_ALL = {"hsx", "hsx.errors", "hsx.ports", "hsx.records", "hsx.config"}

# What hsx modules each part may import, by module prefix; anything else of hsx is a fault. Others' packages are not listed,
# but for the parts that may only use some.
ORCHESTRATION = (
    *("pipeline", "writer", "space", "root_looks", "upkeep", "supervisor", "watchdog", "gate", "admission", "epoch"),
    *("canary", "vouching", "suspects", "sweeper", "tasks", "violated"),
)
CONCRETE = {
    "hsx.dumps.directory",
    "hsx.engines.external",
    "hsx.engines.sglang",
    "hsx.engines.spawn",
    "hsx.stores.ledger",
    "hsx.stores.attach",
    "hsx.stores.root",
    "hsx.stores.view",
    "hsx.datasets.tokens",
    "hsx.datasets.chat",
}


def imported(path: Path, *, at_run_time_only: bool = False) -> set[str]:
    """Full names of the modules that a file imports anywhere; without those under TYPE_CHECKING where asked."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    if at_run_time_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                skipped.update(inner for child in node.body for inner in ast.walk(child))
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            # `from hsx.dumps import measure` may name a module or something in the package: both are recorded.
            names.update({module, *(f"{module}.{alias.name}" for alias in node.names if is_module(f"{module}.{alias.name}"))})
    return names


def is_module(name: str) -> bool:
    path = HSX.parent / Path(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def is_file(name: str) -> bool:
    return (HSX.parent / Path(*name.split("."))).with_suffix(".py").exists()


def modules(*parts: str) -> list[Path]:
    found = sorted(path for part in parts for path in (HSX / part).rglob("*.py"))
    assert found
    return found


def of_hsx(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "hsx"}


def of_others(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - {"hsx"} - set(sys.stdlib_module_names)


def within(name: str, *allowed: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def name_of(path: Path) -> str:
    return str(path.relative_to(HSX))


def test_the_core_needs_the_standard_library_and_errors_only() -> None:
    for path in modules("core"):
        names = imported(path)
        assert of_others(names) == set(), name_of(path)
        assert [name for name in of_hsx(names) if not within(name, "hsx.core", "hsx.errors")] == [], name_of(path)
        assert names & {"asyncio", "time", "random", "logging", "os", "pathlib", "threading"} == set(), name_of(path)


def test_errors_and_ports_know_nothing_above_them() -> None:
    assert of_hsx(imported(HSX / "errors.py")) == set()
    assert of_others(imported(HSX / "errors.py")) == set()
    for name in ("records.py", "ports.py"):
        beside = ("hsx.core", "hsx.errors", *(("hsx.records",) if name == "ports.py" else ()))
        assert [found for found in of_hsx(imported(HSX / name)) if not within(found, *beside)] == [], name
        assert of_others(imported(HSX / name, at_run_time_only=True)) == set(), name


def test_adapters_know_ports_and_core_and_never_each_other() -> None:
    for adapter in ADAPTERS:
        for path in sorted((HSX / adapter).rglob("*.py")):
            allowed = (f"hsx.{adapter}", "hsx.core", "hsx.errors", "hsx.ports", "hsx.records", "hsx.config")
            assert [n for n in of_hsx(imported(path)) if n != "hsx" and not within(n, *allowed)] == [], name_of(path)


def test_the_capture_side_needs_what_a_server_has() -> None:
    for path in modules("capture"):
        names = imported(path)
        assert of_others(names) <= {"numpy", "torch", "sglang"}, name_of(path)
        assert [n for n in of_hsx(names) if n != "hsx" and not within(n, "hsx.capture", "hsx.core", "hsx.errors")] == [], (
            name_of(path)
        )


def test_orchestration_knows_ports_and_no_adapter() -> None:
    for name in ORCHESTRATION:
        path = HSX / f"{name}.py"
        beside = tuple(f"hsx.{other}" for other in ORCHESTRATION)
        assert [
            n for n in of_hsx(imported(path)) if not within(n, "hsx.core", "hsx.errors", "hsx.ports", "hsx.records", *beside)
        ] == [], name


def test_only_app_and_the_commands_name_concrete_adapters() -> None:
    """`wiring` is a part of app; `prepare` and `index` open a job for it; the others are bodies of commands."""
    bodies = {"show.py", "move.py", "repair.py", "rebuild.py", "census.py", "tidy.py", "seal.py", "import_run.py"}
    allowed = {"app.py", "wiring.py", "prepare.py", "index.py", "__init__.py"} | bodies
    for path in sorted(HSX.glob("*.py")):
        if path.name not in allowed:
            assert imported(path, at_run_time_only=True) & CONCRETE == set(), path.name


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Names that are imported for types alone, or within a function, count as well. A package's face hands on what it has."""
    graph = {}
    for path in sorted(HSX.rglob("*.py")):
        if path.name != "__init__.py":
            name = ".".join(path.relative_to(HSX.parent).with_suffix("").parts)
            graph[name] = {found for found in of_hsx(imported(path)) if is_file(found)}
    assert len(graph) > 200
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_nothing_shipped_imports_the_tests_helpers() -> None:
    for path in sorted(HSX.rglob("*.py")):
        if "testing" not in path.parts:
            assert [n for n in of_hsx(imported(path)) if within(n, "hsx.testing")] == [], name_of(path)


@pytest.mark.parametrize(
    "module",
    ["hsx", "hsx.cli", "hsx.config", "hsx.config_load", "hsx.serve", "hsx.commands.serve", "hsx.capture", "hsx.exit_codes"],
)
def test_what_runs_in_the_servers_environment_needs_nothing_of_ours(module: str) -> None:
    """hsx is installed there with --no-deps; msgspec comes with SGLang."""
    program = textwrap.dedent(
        f"""
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] not in sys.stdlib_module_names | {{"hsx", "msgspec"}}:
                    raise ImportError(f"{{name}} is not there")

        sys.meta_path.insert(0, Blocker())
        import {module}
        """
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
