"""The store's Zarr group: what it says of itself, and how it is created and opened.

`<store>/zarr.json` carries the attribute `hsx` (`StoreInfo`); beside it lie the token arrays (`tokens.py`), the union view
`hidden_states` (`view.py`) and, once the server has reported it, `final_norm_weight`.
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core.layout import CRC_BYTES, StoreLayout, index_of_key
from hsx.core.spec import FINAL_STATES, CaptureSpec
from hsx.errors import RunError
from hsx.stores import metadata
from hsx.stores.checksum import crc32c
from hsx.stores.durable import make_folder, store_error, write_file, write_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from os import PathLike

    from numpy.typing import NDArray

FORMAT: Final = "hsx-store-2"
FIRST_FORMAT: Final = "hsx-store-1"
"""Still read: its shards have no records, and are never compressed."""
REDUCED_FORMAT: Final = "hsx-store-3"
"""Of stores that keep less than was captured; the format is another one so that no older reader takes them for whole."""
_WHOLE: Final[dict[str, Any]] = {"tokens": "all", "context": 0, "dtype": "bf16"}
FINAL_NORM: Final = "final_norm_weight"


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What a store says of itself.

    Attributes:
        path: the group's folder.
        store_id: uuid4; also the name of the store's folder on each root.
        layout: shape and cut of `hidden_states`.
        spec: the layers and the final state.
        model: facts of the model as JSON values, such as name, revision, layers, vocab_size.
        roots: name and path of each root, in the order in which they were added.
        run: the run id of the ledger that this store belongs to; "" where there is none.
        sealed: JSON values that say when and how it was sealed; None for a store that may change.
    """

    path: Path
    store_id: str
    layout: StoreLayout
    spec: CaptureSpec
    model: Mapping[str, Any]
    roots: Mapping[str, Path] = field(default_factory=dict)
    run: str = ""
    sealed: Mapping[str, Any] | None = None

    @property
    def format(self) -> str:
        """`FORMAT`, `REDUCED_FORMAT`, or `FIRST_FORMAT`."""
        if self.layout.reduced:
            return REDUCED_FORMAT
        return FORMAT if self.layout.records else FIRST_FORMAT

    @property
    def attributes(self) -> dict[str, Any]:
        """The group's attributes."""
        return {
            "hsx": {
                "format": self.format,
                "store_id": self.store_id,
                "run": self.run,
                "samples": self.layout.samples,
                "max_tokens": self.layout.max_tokens,
                "chunk_tokens": self.layout.chunk_tokens,
                **({"codec": self.layout.codec} if self.layout.records else {}),
                **(
                    {"tokens": self.layout.kept, "context": self.layout.context, "dtype": self.layout.dtype}
                    if self.layout.reduced
                    else {}
                ),
                "states": list(self.spec.names),
                "layers": list(self.spec.layers),
                "final": self.spec.final,
                "hidden_size": self.layout.hidden_size,
                "model": dict(self.model),
                "roots": [{"name": name, "path": str(path)} for name, path in self.roots.items()],
                **({} if self.sealed is None else {"sealed": dict(self.sealed)}),
            }
        }

    def folder(self, root: str) -> Path:
        """Where the shards of `root` lie. Raises RunError `store_invalid` for a root that the store does not know."""
        if root not in self.roots:
            raise RunError("store_invalid", f"store {self.path} has no root {root!r}; it has {', '.join(self.roots) or 'none'}")
        return self.roots[root] / self.store_id


def create_store(
    path: str | PathLike[str], layout: StoreLayout, spec: CaptureSpec, model: Mapping[str, Any], run: str = ""
) -> StoreInfo:
    """Creates the group and its empty `hidden_states`, in place of an empty store (see `refuse_populated`) that is there.

    The group's own metadata is written last: a store whose creation was cut short is created again. Token arrays already in the
    folder are left alone.

    Args:
        path: the store.
        layout: shape and cut of `hidden_states`.
        spec: the layers and the final state.
        model: facts of the model as JSON values.
        run: the run id of the ledger that the store belongs to.

    Raises:
        RunError: `job_changed` where shards are there; `store_invalid`, `store_unwritable`.
        ValueError: the layout and the spec disagree on the number of states.
    """
    if layout.states != spec.states:
        raise ValueError(f"layout has {layout.states} states; the capture spec has {spec.states}")
    path = Path(path).absolute()
    refuse_populated(path)
    document: dict[str, Any] = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        document = read_attributes(path)
    info = StoreInfo(path, str(uuid.uuid4()), layout, spec, model, run=run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        make_folder(path)
        make_folder(path / metadata.HIDDEN_STATES)
        write_json(path / metadata.HIDDEN_STATES / metadata.METADATA, metadata.hidden_states(layout, array_attributes(info)))
        write_json(path / metadata.METADATA, metadata.group(document | info.attributes))
    except OSError as error:
        raise store_error(error, path) from error
    return info


def refuse_populated(path: str | PathLike[str]) -> None:
    """For a job without a ledger: refuses a store that has shards, in the union view or on a root that it has recorded.

    They belong to a ledger that is elsewhere. A store without any, left by a first run that was cut short, is free to take.

    Raises:
        RunError: `job_changed`, also where a recorded root cannot be looked at; `store_invalid`.
    """
    path = Path(path).absolute()
    places = [path / metadata.HIDDEN_STATES]
    run = ""
    try:
        if "hsx" in read_attributes(path):
            info = open_store(path)
            run = info.run
            places += [info.folder(root) for root in info.roots]
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise RunError("store_invalid", f"{path / metadata.METADATA} cannot be read: {error.strerror}") from error
    for place in places:
        if reason := _occupied(place, may_lack=place == places[0]):
            raise RunError(
                "job_changed",
                f"store {path} belongs to the ledger of run {run or 'unknown'}, and this job has no ledger yet: {reason}; put "
                "the state folder (job.state_dir) with that ledger back, build it again (hsx repair JOB --rebuild-ledger), or "
                "give job.store another path",
            )


def require_run(info: StoreInfo, run: str, ledger: Path) -> None:
    """Refuses a store and a ledger that do not belong to each other. Raises RunError `job_changed`."""
    if info.run != run:
        raise RunError(
            "job_changed",
            f"store {info.path} belongs to the ledger of run {info.run or 'unknown'}; ledger {ledger} is of run {run}; "
            "expected them to be of one job: put back the store or the state folder that was exchanged; where the ledger was "
            "being built again, call hsx repair JOB --rebuild-ledger once more, which finishes it",
        )


def require_unsealed(info: StoreInfo) -> None:
    """Refuses a store that was sealed: nothing in it may change any more. Raises RunError `store_sealed`."""
    if info.sealed is not None:
        since = info.sealed.get("at", "an unknown time")
        raise RunError(
            "store_sealed",
            f"store {info.path} is sealed since {since}; expected one that may change (hsx seal --undo takes the seal away)",
        )


def _occupied(place: Path, *, may_lack: bool) -> str:
    """The first shard, or link to one, in a folder, as a sentence; "" where there is none."""
    try:
        with os.scandir(place) as entries:
            return next((f"{entry.path} is there" for entry in entries if index_of_key(entry.name) is not None), "")
    except (FileNotFoundError, NotADirectoryError):
        return "" if may_lack else f"its root {place.parent} has no folder {place.name}: it may have shards elsewhere"
    except OSError as error:
        return f"{place} cannot be looked at: {error.strerror}"


def open_store(path: str | PathLike[str]) -> StoreInfo:
    """Reads what the store at `path` says of itself. Raises RunError `store_invalid`."""
    path = Path(path).absolute()
    try:
        attributes = read_attributes(path)
    except OSError as error:
        reason = f"is not an hsx store: {metadata.METADATA}: {error.strerror}" if path.exists() else "does not exist"
        raise RunError("store_invalid", f"{path} {reason}; expected the folder of a store") from error
    found = attributes.get("hsx")
    form = found.get("format") if isinstance(found, dict) else None
    if not isinstance(found, dict) or form not in (FORMAT, REDUCED_FORMAT, FIRST_FORMAT):
        raise RunError(
            "store_invalid",
            f"{path} is not an hsx store: format is {form!r}; expected {FORMAT!r}, {REDUCED_FORMAT!r} or {FIRST_FORMAT!r}",
        )
    try:
        if found["final"] not in FINAL_STATES:
            raise ValueError(f"final is {found['final']!r}")
        spec = CaptureSpec(tuple(int(k) for k in found["layers"]), "post_norm" if found["final"] == "post_norm" else "pre_norm")
        numbers = {name: int(found[name]) for name in ("samples", "max_tokens", "hidden_size", "chunk_tokens")}
        records = form != FIRST_FORMAT
        codec = str(found["codec"]) if records else "none"
        less = found if form == REDUCED_FORMAT else _WHOLE
        layout = StoreLayout(
            states=spec.states,
            codec=codec,
            records=records,
            kept=str(less["tokens"]),
            context=int(less["context"]),
            dtype=str(less["dtype"]),
            **numbers,
        )
        return StoreInfo(
            path=path,
            store_id=str(uuid.UUID(found["store_id"])),
            layout=layout,
            spec=spec,
            model=dict(found["model"]),
            roots={root["name"]: Path(root["path"]) for root in found["roots"]},
            run=str(found.get("run", "")),
            sealed=None if found.get("sealed") is None else dict(found["sealed"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError("store_invalid", f"{path} is not an hsx store: {type(error).__name__}: {error}") from error


def record_roots(info: StoreInfo, roots: Mapping[str, Path]) -> StoreInfo:
    """Adds roots, or gives known ones another path, in the group's attributes.

    Raises RunError `store_unwritable`, `store_sealed`.
    """
    changed = replace(info, roots={**info.roots, **roots})
    if changed.roots != info.roots:
        require_unsealed(info)
        try:
            write_json(info.path / metadata.METADATA, metadata.group(read_attributes(info.path) | changed.attributes))
        except OSError as error:
            raise store_error(error, info.path) from error
    return changed


def forget_roots(info: StoreInfo, names: Collection[str]) -> StoreInfo:
    """Takes roots out of the group's attributes; nothing on them is touched. Raises RunError `store_unwritable`."""
    changed = replace(info, roots={name: path for name, path in info.roots.items() if name not in names})
    try:
        write_json(info.path / metadata.METADATA, metadata.group(read_attributes(info.path) | changed.attributes))
    except OSError as error:
        raise store_error(error, info.path) from error
    return changed


def record_run(info: StoreInfo, run: str) -> StoreInfo:
    """Gives a store to another ledger: one that was built again. Raises RunError `store_unwritable`."""
    changed = replace(info, run=run)
    try:
        write_json(info.path / metadata.METADATA, metadata.group(read_attributes(info.path) | changed.attributes))
    except OSError as error:
        raise store_error(error, info.path) from error
    return changed


def record_final_norm(path: str | PathLike[str], weight: NDArray[np.float32], eps: float) -> None:
    """Keeps the final norm of the model, so that `pre_norm` states can be turned into `post_norm` ones at export.

    Args:
        path: the store.
        weight: float32 [H], as the server reported it at its boot; recorded once.
        eps: epsilon of the norm.

    Raises:
        RunError: `job_changed` where another norm was recorded before (the model's weights changed), `store_unwritable`.
        ValueError: `weight` is not float32 [H].
    """
    info = open_store(path)
    if weight.dtype != np.float32 or weight.shape != (info.layout.hidden_size,):
        raise ValueError(f"final norm is {weight.dtype} {weight.shape}; expected float32 ({info.layout.hidden_size},)")
    before = read_final_norm(info.path)
    if before is not None:
        if not np.array_equal(before[0], weight) or before[1] != eps:
            raise RunError("job_changed", f"final norm (eps {eps}) differs from that of store {info.path} (eps {before[1]})")
        return
    folder = info.path / FINAL_NORM
    data = np.frombuffer(weight.astype("<f4").tobytes(), np.uint8)
    try:
        make_folder(folder)
        write_file(folder / "c.0", data.tobytes() + crc32c(data).to_bytes(CRC_BYTES, "little"))
        write_json(folder / metadata.METADATA, metadata.vector(weight.size, "float32", {"eps": eps}))
    except OSError as error:
        raise store_error(error, folder) from error


def read_final_norm(path: str | PathLike[str]) -> tuple[NDArray[np.float32], float] | None:
    """The recorded final norm: weight float32 [H] and eps; None where there is none yet. Raises RunError `store_invalid`."""
    folder = Path(path) / FINAL_NORM
    try:
        eps = float(read_attributes(folder)["eps"])
        raw = np.fromfile(folder / "c.0", np.uint8)
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError("store_invalid", f"{folder} cannot be read: {error}") from error
    if raw.size <= CRC_BYTES or raw.size % 4 or crc32c(raw[:-CRC_BYTES]) != int(raw[-CRC_BYTES:].view("<u4")[0]):
        raise RunError("store_invalid", f"{folder} does not match its crc32c")
    return raw[:-CRC_BYTES].view("<f4"), eps


def array_attributes(info: StoreInfo) -> dict[str, Any]:
    """Attributes of a `hidden_states` array, so that it explains itself when it is opened alone."""
    return {"hsx": {"format": info.format, "store_id": info.store_id, "states": list(info.spec.names)}}


def read_attributes(path: Path) -> dict[str, Any]:
    """The attributes of the Zarr node at `path`. Raises OSError, and RunError `store_invalid` where they cannot be read."""
    try:
        attributes = json.loads((path / metadata.METADATA).read_bytes()).get("attributes", {})
    except (ValueError, AttributeError) as error:
        raise RunError("store_invalid", f"{path / metadata.METADATA} is not Zarr metadata: {error}") from error
    return attributes if isinstance(attributes, dict) else {}
