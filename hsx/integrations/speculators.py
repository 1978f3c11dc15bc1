"""speculators' trainer on a store: a backend `hsx` of `hs_connectors`, in place of files in `hidden_states/`.

The trainer still wants its Arrow dataset of ids and masks, which `hsx export STORE FOLDER --to speculators --index-only` writes
in a moment. `python -m hsx.integrations.speculators_cli train ARGUMENTS` is its own command line with this backend in it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer

from hsx.errors import RunError
from hsx.export import load_format
from hsx.export.manifest import INDEX, read_manifest
from hsx.export.mapping import map_states
from hsx.exporting import refuse_partial
from hsx.stores.reader import Store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from os import PathLike

    import torch


class HsxTransfer(HiddenStatesTransfer):  # type: ignore[misc]  # hs-connectors is not there for type checkers
    """Rows of an Arrow dataset out of a store. Picklable, for spawned workers.

    Args:
        path: the store; its final state is pre_norm.
        rows: the index in the store of each row; default: all that are committed now, in order, as `hsx export` numbers them.
        layers: the k of the layers h_k, in the order of the slots; default: all that the store has.
        roots: where roots are mounted today, by name, if neither where the store says nor beside it.
        check: prove what is read by its checksums.

    Raises:
        RunError: `store_invalid`; `export_refused` where the store has not what speculators wants.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        rows: Sequence[int] | None = None,
        *,
        layers: Sequence[int] | None = None,
        roots: Mapping[str, str | PathLike[str]] | None = None,
        check: bool = True,
    ) -> None:
        self.store = Store(path, roots=roots, check=check)
        refuse_partial(self.store)
        has_norm = self.store.final_norm is not None
        self._states = map_states(load_format("speculators"), self.store.info.spec, layers, has_norm=has_norm).stored
        self._rows = self.store.committed if rows is None else np.asarray(rows, np.int64)

    @classmethod
    def of_export(cls, folder: str | PathLike[str], store: str | PathLike[str] | None = None) -> HsxTransfer:
        """The transfer that serves the rows of an export, made with or without `--index-only`.

        Args:
            folder: the export.
            store: where the store is now; default: where it was.

        Raises:
            RunError: `export_refused` where the folder is no such export, or of another store; else as above.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        try:
            rows = np.load(folder / INDEX)
            identity = manifest["identity"]
            wanted = (identity["to"], identity["selection"])
            layers = manifest["mapping"]["layers"]
            recorded = manifest["store"]["path"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError("export_refused", f"{folder} is no whole export: {error}") from error
        found = ("speculators", hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest())
        if wanted != found:
            raise RunError("export_refused", f"{folder} is an export (format, rows) {wanted}; expected {found}")
        made = cls(recorded if store is None else store, rows.tolist(), layers=layers)
        if made.store.info.store_id != identity["store_id"]:
            raise RunError(
                "export_refused",
                f"{folder} is an export of store {identity['store_id']}; {made.store.path} is {made.store.info.store_id}",
            )
        return made

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """`token_ids` int64 [S] and `hidden_states` bfloat16 [S, K + 1, H] of a row; None for a row that there is not.

        Raises RunError: `store_invalid`, `root_unusable`. A damaged sample is an error, and not one that is missing.
        """
        if not 0 <= file_idx < len(self._rows):
            return None
        sample = self.store.sample(int(self._rows[file_idx]), states=self._states)
        return {"token_ids": sample.input_ids, "hidden_states": sample.hidden_states}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """None: a store generates nothing."""
        return None


@HiddenStatesBackend.register("hsx")
class HsxBackend(HiddenStatesBackend):  # type: ignore[misc]  # hs-connectors is not there for type checkers
    """`--hidden-states-backend hsx` of speculators' trainer."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Adds `--hsx-store`."""
        parser.add_argument(
            "--hsx-store", type=str, default=None, help="the hsx store (default: where --data-path says it was)"
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Nothing: no server is launched for a store."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> HsxTransfer:
        """The transfer for `--data-path`, the folder of `hsx export --to speculators`."""
        return HsxTransfer.of_export(data_path, args.hsx_store)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Raises RunError `usage`: vLLM does not write hsx stores."""
        raise RunError("usage", "vLLM does not write hsx stores; expected another backend for launching it, such as file")
