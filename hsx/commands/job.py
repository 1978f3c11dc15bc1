"""What several commands do first: read the job file, check it, refuse it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx.config_check import Finding, check
from hsx.config_load import LoadedConfig, load
from hsx.errors import ConfigError, RunError
from hsx.model_config import read_model_shape
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME

if TYPE_CHECKING:
    from hsx.core.spec import ModelShape


def examine(loaded: LoadedConfig) -> tuple[ModelShape | None, list[Finding]]:
    """The model's shape, None where it cannot be read, and all findings on the job file, errors first.

    Raises RunError `ledger_failed` where the job has been run and its ledger cannot be read.
    """
    shape, findings = None, []
    try:
        shape = read_model_shape(loaded.model)
    except RunError as error:
        findings.append(Finding("error", "model.path", error.message))
    return shape, [*findings, *check(loaded, shape, _longest(loaded))]


def _longest(loaded: LoadedConfig) -> int | None:
    """Tokens of the longest sample, once a run has read the dataset."""
    path = loaded.state_dir / FILE_NAME
    if not path.exists():
        return None
    with LedgerReader(path) as ledger:
        return ledger.longest()


def require_begun(loaded: LoadedConfig) -> None:
    """Raises RunError `not_run_yet` where the job has neither ledger nor store."""
    ledger = loaded.state_dir / FILE_NAME
    if not ledger.exists() and not loaded.store.exists():
        raise RunError(
            "not_run_yet",
            f"this job has not been run yet; start it with hsx run {loaded.path} (neither {ledger} nor {loaded.store} exists)",
        )


def load_fit(path: str) -> tuple[LoadedConfig, list[Finding]]:
    """A job file without errors, and the warnings on it.

    Raises:
        ConfigError: as `load` does, and `config_conflict` with one problem for each finding that is an error.
    """
    loaded = load(path)
    _, findings = examine(loaded)
    errors = [f"{path}: {finding.key}: {finding.message}" for finding in findings if finding.level == "error"]
    if errors:
        raise ConfigError("config_conflict", errors)
    return loaded, findings
