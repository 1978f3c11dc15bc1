"""Reads a job file: TOML into `hsx.config.Config`, with every fault that can be found reported at once.

Light on imports (the standard library and msgspec): `hsx serve` reads the same file inside the server's environment.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo, fields

from hsx.config import Config, Dataset, Engine, Job, Model, Root, Section, Staging
from hsx.core.spec import CaptureSpec
from hsx.errors import ConfigError

_S = TypeVar("_S", bound=Section)
_UNITS: Final = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_WORDS: Final = {"`str`": "text", "`int`": "an integer", "`float`": "a number", "`bool`": "true or false", "`array`": "a list"}
_LONGEST_VALUE: Final = 80


def parse_size(text: str) -> int:
    """The bytes that a size such as `"8GiB"` or `"1.5 TB"` spells, rounded down. Raises ValueError for any other text."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"size is {text!r}; expected a number with one of the units {', '.join(_UNITS)}")
    return int(Decimal(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, slots=True)
class RootPlace:
    """One root, resolved: `path` is absolute, `reserve` in bytes."""

    name: str
    path: Path
    reserve: int


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A job file as read and resolved.

    Attributes:
        config: the decoded file; every path in it is absolute and `job.state_dir` is filled in.
        path: the job file, absolute.
        store: the Zarr group that is made.
        state_dir: folder of the ledger and the locks.
        dataset: the dataset file.
        model: the model's folder.
        chat_template: the template that replaces the tokenizer's own, or None.
        dump_dir: the dump directory.
        staging_bytes: bytes that dumps may take at once.
        roots: the roots in the order of the file.
    """

    config: Config
    path: Path
    store: Path
    state_dir: Path
    dataset: Path
    model: Path
    chat_template: Path | None
    dump_dir: Path
    staging_bytes: int
    roots: tuple[RootPlace, ...]

    @property
    def server_unit(self) -> str:
        """The server's unit, for `engine.ownership = "systemd"`."""
        return self.config.engine.unit or f"hsx-sglang@{self.path.stem}.service"

    @property
    def spec(self) -> CaptureSpec:
        """The capture spec that the job file asks for."""
        return CaptureSpec(tuple(self.config.capture.layers), self.config.capture.final)


def load(path: str | os.PathLike[str]) -> LoadedConfig:
    """Reads, decodes and resolves the job file at `path`. Touches nothing else on the disk.

    Raises:
        ConfigError: `config_unreadable` where it cannot be read or is not TOML; `config_invalid` with one problem for each
            key that is unknown, missing, of the wrong type or out of range.
    """
    file = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links, and absolute() keeps ".."
    try:
        text = file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except IsADirectoryError as error:
        hint = "; of a store `hsx verify --store` and `hsx export` take the folder" if (file / "zarr.json").exists() else ""
        raise ConfigError("config_unreadable", [f"{path}: is a folder; expected a job file{hint}"]) from error
    except OSError as error:
        raise ConfigError("config_unreadable", [f"{path}: cannot be read: {error.strerror or error}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError("config_unreadable", [f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config_unreadable", [f"{path}: is not TOML: {error}{_line_of(error, text)}"]) from error
    return resolve(decode(document, str(path)), file)


def _line_of(error: tomllib.TOMLDecodeError, text: str) -> str:
    """The line that the parser stopped at, for the message; "" at the end of the file."""
    place = re.search(r"\(at line ([0-9]+), column [0-9]+\)$", str(error))
    lines = text.split("\n")
    if place is None or int(place[1]) > len(lines):
        return ""
    return f": {_shown(lines[int(place[1]) - 1].strip())}"


def decode(document: dict[str, Any], name: str) -> Config:
    """Decodes a parsed job file.

    Args:
        document: what tomllib gave.
        name: the file's name, for messages.

    Raises:
        ConfigError: `config_invalid`; all faults at once.
    """
    decoder = _Decoder(name)
    decoder.table(document, Config, "")
    if decoder.problems:
        raise ConfigError("config_invalid", decoder.problems)
    try:
        return msgspec.convert(document, Config)
    except msgspec.ValidationError as error:  # a rule that the field-wise pass does not know
        raise ConfigError("config_invalid", [f"{name}: {error}"]) from error


def resolve(config: Config, file: Path) -> LoadedConfig:
    """Makes every path absolute, relative ones from the folder of the job file; `~` is the home folder. Links are kept."""

    def at(text: str) -> Path:
        return Path(os.path.abspath(file.parent / Path(text).expanduser()))  # noqa: PTH100 - see load

    store = at(config.job.store)
    state_dir = at(config.job.state_dir) if config.job.state_dir else store.with_name(store.name + ".job")
    dataset, model, dump_dir = at(config.dataset.path), at(config.model.path), at(config.staging.dump_dir)
    template = at(config.dataset.chat_template) if config.dataset.chat_template else None
    roots = tuple(RootPlace(root.name, at(root.path), parse_size(root.reserve)) for root in config.roots)
    python = config.engine.python
    resolved = _replace(
        config,
        job=_replace(config.job, store=str(store), state_dir=str(state_dir)),
        model=_replace(config.model, path=str(model)),
        dataset=_replace(config.dataset, path=str(dataset), chat_template=str(template or "")),
        staging=_replace(config.staging, dump_dir=str(dump_dir)),
        roots=[_replace(root, path=str(place.path)) for root, place in zip(config.roots, roots, strict=True)],
        status=_replace(config.status, token_file=str(at(config.status.token_file)) if config.status.token_file else ""),
        # A bare name is looked up in PATH when the server is started.
        engine=_replace(config.engine, python=str(at(python)) if "/" in python else python),
    )
    return LoadedConfig(
        config=resolved,
        path=file,
        store=store,
        state_dir=state_dir,
        dataset=dataset,
        model=model,
        chat_template=template,
        dump_dir=dump_dir,
        staging_bytes=parse_size(config.staging.max_bytes),
        roots=roots,
    )


def _replace(section: _S, **changes: object) -> _S:
    return msgspec.structs.replace(section, **changes)


# Texts that name a place or a thing, so that "" is as good as missing.
_NOT_EMPTY: Final = frozenset(
    {(Job, "store"), (Model, "path"), (Dataset, "path"), (Staging, "dump_dir"), (Root, "path"), (Engine, "host")}
)


class _Decoder:
    """Checks a document field by field, because msgspec stops at the first fault."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.problems: list[str] = []

    def table(self, found: object, section: type[Section], key: str) -> None:
        if not isinstance(found, dict):
            self._problem(key, found, "expected a table")
            return
        known = {field.encode_name: field for field in fields(section)}
        for name in [name for name in found if name not in known]:
            self._problem(_join(key, name), found[name], self._unknown(name, list(known), key))
        meant = {near for name in found if name not in known for near in _near(name, list(known))}
        for name, field in known.items():
            where = _join(key, name)
            if name in found:
                self._field(found[name], field, section, where)
            elif field.required and name not in meant:  # else the question whether it was meant says it
                self.problems.append(f"{self._name}: {where} is missing; expected {_wanted(field.type)}")

    def _field(self, value: object, field: FieldInfo, section: type[Section], key: str) -> None:
        kind = field.type
        if isinstance(kind, type) and issubclass(kind, Section):
            self.table(value, kind, key)
            return
        item = _section_of_list(kind)
        if item is not None and isinstance(value, list) and value:
            for number, entry in enumerate(value):
                self.table(entry, item, f"{key}[{number}]")
            return
        if item is not None and isinstance(value, dict):
            self._problem(key, value, f"write [[{key}]], with two brackets")
            return
        if isinstance(value, float) and not math.isfinite(value):
            self._problem(key, value, "expected a finite number")
            return
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            self._problem(key, value, f"expected {_wanted(kind) if _is_described(kind) else _expected(str(error))}")
            return
        if (section, field.name) in _NOT_EMPTY and not str(value).strip():
            self._problem(key, value, "expected text that is not empty")

    def _unknown(self, name: str, known: list[str], key: str) -> str:
        near = _near(name, known)
        if near:
            return f"unknown key; did you mean {_join(key, near[0])}?"
        elsewhere = [place for place in _all_keys() if place.rpartition(".")[2] == name]
        if elsewhere:
            return f"unknown key; did you mean {' or '.join(elsewhere)}?"
        return f"unknown key; expected one of {', '.join(known)}"

    def _problem(self, key: str, value: object, expected: str) -> None:
        self.problems.append(f"{self._name}: {key or 'the file'} = {_shown(value)}: {expected}")


def _near(name: str, known: list[str]) -> list[str]:
    """The known name that an unknown one looks like, if there is one."""
    return difflib.get_close_matches(name, known, n=1)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _section_of_list(kind: object) -> type[Section] | None:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    item = get_args(kind)[0] if get_origin(kind) is list else None
    return item if isinstance(item, type) and issubclass(item, Section) else None


def _all_keys() -> list[str]:
    keys = []
    for field in fields(Config):
        section = field.type if isinstance(field.type, type) else _section_of_list(field.type)
        if isinstance(section, type) and issubclass(section, Section):
            keys += [f"{field.encode_name}.{inner.encode_name}" for inner in fields(section)]
    return keys


def _description(kind: object) -> str:
    metas = [meta for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta)] if get_origin(kind) is Annotated else []
    return next((meta.description for meta in metas if meta.description), "")


def _is_described(kind: object) -> bool:
    """Whether `_wanted` says more than msgspec does."""
    return bool(_description(kind)) or get_origin(kind) is Literal


def _wanted(kind: object) -> str:
    """What a key takes, in words."""
    described = _description(kind)
    if described:
        return described
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, Section):
        return "a table"
    if _section_of_list(kind) is not None:
        return "one table or more"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    return _WORDS.get(f"`{getattr(kind, '__name__', kind)}`", "a list" if get_origin(kind) is list else "a value")


def _expected(message: str) -> str:
    """msgspec's message in the words of a job file: "Expected `int` >= 1 - at `$[0]`" gives "an integer >= 1 at [0]"."""
    text, _, where = message.partition(" - at `$")
    text = text.removeprefix("Expected ")
    for type_name, words in _WORDS.items():
        text = text.replace(type_name, words)
    place = where.rstrip("`")
    return text + (f", at {place}" if place not in ("", "[...]") else "")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
