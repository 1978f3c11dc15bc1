"""What a sealed store has besides: where each sample lies and its checksum, as arrays, and a manifest of every small file.

`root` (int16, an index into its attribute `names`, -1 for none), `crc32c` (uint32, of the payload) and `committed` (uint8) have
one value a sample; so has `captured_as` (int64), where samples with identical prompts share shards. `manifest.json` has the
sha256 of each metadata and token file, the group's own included. The group's metadata is written last, with the attribute
`sealed` and the metadata of all arrays consolidated: then the store is sealed, and before it is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core.layout import CRC_BYTES
from hsx.errors import RunError
from hsx.stores import metadata
from hsx.stores.attach import IDENTITY
from hsx.stores.checksum import crc32c_bytes
from hsx.stores.durable import store_error, sync_folder, to_json, write_file, write_json
from hsx.stores.group import FINAL_NORM, StoreInfo, read_attributes
from hsx.stores.tokens import ARRAYS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

MANIFEST: Final = "manifest.json"
FORMAT: Final = "hsx-manifest-1"
CHUNK: Final = 1 << 20
SEAL_ARRAYS: Final[dict[str, np.dtype[Any]]] = {
    "root": np.dtype("<i2"),
    "crc32c": np.dtype("<u4"),
    "committed": np.dtype("u1"),
}
CAPTURED_AS: Final = "captured_as"
"""A further array, of stores in which samples with identical prompts share shards."""


@dataclass(frozen=True, slots=True)
class SealedArrays:
    """The arrays of a sealed store, or of one that is being sealed.

    Attributes:
        names: names of the roots.
        root: int16 [samples], an index into `names`; -1: not committed.
        crc32c: uint32 [samples], of the payload; 0 where not committed.
        committed: uint8 [samples] of 0 and 1.
        captured_as: int64 [samples], the sample whose prefill gave the shard: itself, or one with the same prompt, whose shard
            it shares; empty in a store in which nothing is shared.
    """

    names: tuple[str, ...]
    root: NDArray[np.int16]
    crc32c: NDArray[np.uint32]
    committed: NDArray[np.uint8]
    captured_as: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def empty(cls, info: StoreInfo, *, shared: bool = False) -> SealedArrays:
        """Arrays in which no sample is committed; with `shared`, for a store in which samples share shards."""
        samples = info.layout.samples
        own = np.arange(samples if shared else 0, dtype=np.int64)
        names = tuple(info.roots)
        return cls(names, np.full(samples, -1, np.int16), np.zeros(samples, np.uint32), np.zeros(samples, np.uint8), own)

    def put(self, index: int, root: str, crc32c: int, captured_as: int | None = None) -> None:
        """Enters a committed sample. Raises RunError `store_invalid` for a root that the store does not know."""
        if captured_as is not None and self.captured_as.size:
            self.captured_as[index] = captured_as
        if root not in self.names:
            raise RunError("store_invalid", f"sample {index} is on root {root!r}; the store has {', '.join(self.names)}")
        self.root[index] = self.names.index(root)
        self.crc32c[index] = crc32c
        self.committed[index] = 1

    def root_of(self, index: int) -> str | None:
        """Name of the root of a sample; None where it is not committed."""
        number = int(self.root[index])
        return None if number < 0 else self.names[number]


def write_seal(info: StoreInfo, arrays: SealedArrays, facts: Mapping[str, Any]) -> StoreInfo:
    """Seals a store; nothing else may change it meanwhile. Cut short at any point, it is not sealed, and may be sealed again.

    Args:
        info: the store; not sealed.
        arrays: what is committed.
        facts: JSON values that the attribute `sealed` records.

    Returns:
        The store's info, sealed.

    Raises:
        RunError: `store_unwritable`; `root_unusable` where a root's metadata cannot be read.
    """
    sealed = replace(info, sealed=dict(facts))
    try:
        _write_arrays(info.path, arrays)
        document = metadata.group(read_attributes(info.path) | sealed.attributes)
        document["consolidated_metadata"] = {
            "kind": "inline",
            "must_understand": False,
            "metadata": {name: json.loads((info.path / name / metadata.METADATA).read_bytes()) for name in _members(info.path)},
        }
        group = to_json(document)
        files = {name: _digest(info.path / name) for name in small_files(info.path)}
        files[metadata.METADATA] = hashlib.sha256(group).hexdigest()
        manifest = {
            "format": FORMAT,
            "store_id": info.store_id,
            "run": info.run,
            **facts,
            "files": files,
            "roots": {name: _root_files(info, name) for name in info.roots},
        }
        write_json(info.path / MANIFEST, manifest)
        write_file(info.path / metadata.METADATA, group)
    except OSError as error:
        raise store_error(error, info.path) from error
    return sealed


def remove_seal(info: StoreInfo) -> StoreInfo:
    """Makes a store one that may change again; also clears away what a seal that was cut short left. Idempotent.

    Raises RunError `store_unwritable`.
    """
    opened = replace(info, sealed=None)
    try:
        if info.sealed is not None:
            attributes = {name: value for name, value in read_attributes(info.path).items() if name != "hsx"}
            write_json(info.path / metadata.METADATA, metadata.group(attributes | opened.attributes))
        (info.path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(_partial(info.path), ignore_errors=True)
        for name in (*SEAL_ARRAYS, CAPTURED_AS):
            with suppress(FileNotFoundError):
                shutil.rmtree(info.path / name)
        sync_folder(info.path)
    except OSError as error:
        raise store_error(error, info.path) from error
    return opened


def read_seal(info: StoreInfo) -> SealedArrays:
    """The arrays of a sealed store. Raises RunError `store_invalid`, also for a store that is not sealed."""
    if info.sealed is None:
        raise RunError("store_invalid", f"store {info.path} is not sealed; expected the attribute 'sealed'")
    samples = info.layout.samples
    values = {name: _read_vector(info.path / name, dtype, samples) for name, dtype in SEAL_ARRAYS.items()}
    shared = np.empty(0, np.int64)
    if (info.path / CAPTURED_AS / metadata.METADATA).exists():
        shared = _read_vector(info.path / CAPTURED_AS, shared.dtype, samples)
    try:
        names = tuple(str(name) for name in read_attributes(info.path / "root")["names"])
    except (OSError, KeyError, TypeError) as error:
        raise RunError("store_invalid", f"{info.path / 'root'} has no names of roots: {error}") from error
    if int(values["root"].max(initial=-1)) >= len(names):
        raise RunError("store_invalid", f"{info.path / 'root'} has value {values['root'].max()}; it has {len(names)} names")
    return SealedArrays(names, values["root"], values["crc32c"], values["committed"], shared)


def manifest_faults(info: StoreInfo, folders: Mapping[str, Path] | None = None) -> list[str]:
    """What of a sealed store's metadata and tokens is not as the manifest says, one sentence each. Reads all of them.

    Files of roots that cannot be reached are faults.

    Args:
        info: the store.
        folders: the store's folder on each root, by the root's name; default: where the store says.

    Raises:
        RunError: `store_invalid` where there is no manifest to be read.
    """
    try:
        manifest = json.loads((info.path / MANIFEST).read_bytes())
        files: dict[str, str] = dict(manifest["files"])
        roots: dict[str, dict[str, str]] = {name: dict(of_root) for name, of_root in manifest["roots"].items()}
        identity = (manifest["format"], manifest["store_id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError("store_invalid", f"{info.path / MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if identity != (FORMAT, info.store_id):
        return [f"{info.path / MANIFEST} is of {identity}; expected {(FORMAT, info.store_id)}"]
    wanted = {info.path / name: digest for name, digest in files.items()}
    for root, of_root in roots.items():
        folder = (folders or {}).get(root) or (info.folder(root) if root in info.roots else Path(root))
        wanted |= {folder / name: digest for name, digest in of_root.items()}
    faults = []
    for path, digest in wanted.items():
        try:
            found = _digest(path)
        except OSError as error:
            faults.append(f"{path} cannot be read: {error.strerror}")
            continue
        if found != digest:
            faults.append(f"{path} has sha256 {found}; expected {digest}")
    return faults


def small_files(store: Path) -> Iterator[str]:
    """Every metadata and token file of a store, relative to it, in order; without the group's own metadata and the shards."""
    for name in _members(store):
        if name == metadata.HIDDEN_STATES:
            yield f"{name}/{metadata.METADATA}"
            continue
        for folder, folders, files in os.walk(store / name):
            folders.sort()
            for file in sorted(files):
                yield str((Path(folder) / file).relative_to(store))


def _members(store: Path) -> list[str]:
    """The arrays of a store, in order."""
    names = (metadata.HIDDEN_STATES, *ARRAYS, FINAL_NORM, *SEAL_ARRAYS, CAPTURED_AS)
    return sorted(name for name in names if (store / name / metadata.METADATA).exists())


def _root_files(info: StoreInfo, root: str) -> dict[str, str]:
    folder = info.folder(root)
    try:
        return {name: _digest(folder / name) for name in (metadata.METADATA, IDENTITY)}
    except OSError as error:
        raise RunError("root_unusable", f"root {root}: {folder} cannot be read: {error.strerror}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _partial(store: Path) -> Path:
    return store.with_name(store.name + ".seal.partial")


def _write_arrays(store: Path, arrays: SealedArrays) -> None:
    """Writes the arrays beside the store and renames each into it, in place of an earlier one."""
    partial = _partial(store)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    kinds = SEAL_ARRAYS | ({CAPTURED_AS: arrays.captured_as.dtype} if arrays.captured_as.size else {})
    try:
        for name, dtype in kinds.items():
            values = np.ascontiguousarray(getattr(arrays, name), dtype)
            folder = partial / name
            folder.mkdir()
            chunk = min(CHUNK, len(values))
            for number, start in enumerate(range(0, len(values), chunk)):
                part = np.zeros(chunk, dtype)
                part[: len(values) - start] = values[start : start + chunk]
                write_file(folder / f"c.{number}", _with_crc(part.tobytes()))
            attributes = {"names": list(arrays.names)} if name == "root" else {}
            write_json(folder / metadata.METADATA, metadata.vector(len(values), dtype.name, attributes, chunk=chunk))
        with suppress(FileNotFoundError):
            shutil.rmtree(store / CAPTURED_AS)  # of a seal that was cut short
        for name in kinds:
            with suppress(FileNotFoundError):
                shutil.rmtree(store / name)
            (partial / name).rename(store / name)
        sync_folder(store)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _with_crc(payload: bytes) -> bytes:
    return payload + crc32c_bytes(payload).to_bytes(CRC_BYTES, "little")


def _read_vector(folder: Path, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    """A whole array that `_write_arrays` wrote. Raises RunError `store_invalid`."""
    try:
        document = json.loads((folder / metadata.METADATA).read_bytes())
        (chunk,) = document["chunk_grid"]["configuration"]["chunk_shape"]
        wanted = metadata.vector(length, dtype.name, document["attributes"], chunk=chunk)
        if document != wanted:
            raise ValueError(f"array has shape {document['shape']} of {document['data_type']}; expected {length} {dtype.name}")
        parts = []
        for number in range(-(-length // chunk)):
            raw = (folder / f"c.{number}").read_bytes()
            if len(raw) != chunk * dtype.itemsize + CRC_BYTES or _with_crc(raw[:-CRC_BYTES]) != raw:
                raise ValueError(f"c.{number} does not match its crc32c")
            parts.append(np.frombuffer(raw[:-CRC_BYTES], dtype))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError("store_invalid", f"{folder} cannot be read: {type(error).__name__}: {error}") from error
    whole: NDArray[Any] = np.concatenate(parts)[:length]
    return whole
