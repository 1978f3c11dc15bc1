"""Datasets: files of tokenised rows, of conversations or of text, one adapter a form, behind `ports.Dataset`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from hsx.errors import RunError

if TYPE_CHECKING:
    from hsx.config import Config
    from hsx.core.spec import ModelShape
    from hsx.datasets.fields import Columns, Fields
    from hsx.datasets.rows import Limits, Naming, Records
    from hsx.datasets.sources import Source
    from hsx.ports import Dataset

Format = Literal["tokens", "chat", "text"]
SERVER_MARGIN: Final = 8
"""Tokens of the context that SGLang keeps for itself (6 or 7, by version), rounded up."""

FIELDS_SHOWN: Final = 12
FIELD_SHOWN: Final = 40


def longest_allowed(config: Config, shape: ModelShape) -> int:
    """The longest sample in tokens: `dataset.max_tokens`, else the model's context length less `SERVER_MARGIN`."""
    return config.dataset.max_tokens or max(1, shape.context_length - SERVER_MARGIN)


def open_source(config: Config) -> Source:
    """The files that the job file names. Raises RunError `dataset_unreadable`."""
    from hsx.datasets.sources import Source, find_files

    return Source(find_files(Path(config.dataset.path)))


def naming_of(config: Config) -> Naming:
    """What the job file calls the fields."""
    from hsx.datasets.fields import Columns
    from hsx.datasets.rows import Naming

    return Naming(Columns(**config.dataset.columns), config.dataset.ids == "number")


def open_dataset(config: Config, shape: ModelShape, source: Source | None = None) -> Dataset:
    """The dataset that the job file names; with format `auto` this reads as far as the first row that tells.

    Args:
        config: the job file.
        shape: the model's.
        source: the dataset's files, where they were opened already.

    Raises:
        RunError: `dataset_unreadable` where a file cannot be opened; `dataset_empty` where `auto` finds no row of a known
            form, `dataset_ambiguous` where it finds one of several; `chat_unavailable` where text cannot be tokenised;
            `dependency_missing` without the extra `parquet`.
    """
    from hsx.datasets.rows import Limits

    source = source or open_source(config)
    if config.storage.tokens == "loss":
        from hsx.datasets.masked import MaskedRows

        whole = msgspec.structs.replace(config, storage=msgspec.structs.replace(config.storage, tokens="all", context=0))
        return MaskedRows(open_dataset(whole, shape, source), source.unit)
    naming = naming_of(config)
    limits = Limits(shape.vocab_size, longest_allowed(config, shape), config.dataset.too_long)
    kind = detect_format(source, naming.columns) if config.dataset.format == "auto" else config.dataset.format
    if kind == "tokens":
        from hsx.datasets.tokens import TokenRows

        return TokenRows(source, limits, naming)
    if kind == "text":
        return _open_text(config, source, limits, naming)
    from hsx.datasets.chat import ChatRows
    from hsx.datasets.template import ChatTemplate, Style

    chosen = config.dataset
    template = Path(chosen.chat_template) if chosen.chat_template else None
    style = Style(chosen.thinking, chosen.loss_on == "last", chosen.template_args)
    chat = ChatTemplate(Path(config.model.path), template, style)
    return ChatRows(source, limits, chat, naming, chosen.roles, alike=chosen.tokenizer_differs == "refuse")


def _open_text(config: Config, source: Source, limits: Limits, naming: Naming) -> Dataset:
    from hsx.datasets.text import TextRows
    from hsx.datasets.tokenizer import RawTokenizer

    markers = config.dataset.text_markers
    pair = (markers[0], markers[1]) if markers else None
    alike = config.dataset.tokenizer_differs == "refuse"
    return TextRows(source, limits, RawTokenizer(Path(config.model.path)), pair, naming, alike=alike)


def forms_of(fields: Fields, columns: Columns) -> dict[str, Format]:
    """In which forms a row can be read: by the field that each needs; a field that is null is none."""
    forms: tuple[tuple[str, Format], ...] = (
        (columns.input_ids, "tokens"),
        (columns.messages, "chat"),
        (columns.conversations, "chat"),
        (columns.text, "text"),
    )
    return {name: form for name, form in forms if fields.has(name)}


def detect_format(source: Records, columns: Columns | None = None) -> Format:
    """The format of the first row that has token ids, a conversation or text; rows before it are passed over.

    Raises:
        RunError: `dataset_ambiguous` where that row has several of them, `dataset_empty` where no row has any,
            `dataset_unreadable`.
    """
    from hsx.datasets.fields import Bad, Columns

    columns = columns or Columns()
    lines = 0
    seen: list[str] | None = None
    for line, fields in source.records():
        lines += 1
        if isinstance(fields, Bad):
            continue
        seen = list(fields.types()) if seen is None else seen
        if found := forms_of(fields, columns):
            if len(found) > 1:
                raise _ambiguous(f"{getattr(source, 'path', 'the dataset')}, {getattr(source, 'unit', 'line')} {line}", found)
            return next(iter(found.values()))
    known = ", ".join(map(repr, (columns.input_ids, columns.conversations, columns.messages)))
    raise RunError(
        "dataset_empty",
        f"{getattr(source, 'path', 'the dataset')}: none of {lines} row{'' if lines == 1 else 's'} has a field {known} or "
        f"{columns.text!r}{_found(seen)}",
    )


def _ambiguous(where: str, found: dict[str, Format]) -> RunError:
    ways = [f"{form!r} reads {name!r}" for name, form in found.items()]
    if len(set(found.values())) == 1:
        names = list(found)
        hint = f"dataset.columns = {{ messages = {names[0]!r}, conversations = {names[0]!r} }} (or both {names[1]!r})"
    else:
        hint = f"dataset.format ({', '.join(ways)})"
    return RunError("dataset_ambiguous", f"{where}: it has {' and '.join(map(repr, found))}; expected to be told which: {hint}")


def _found(fields: list[str] | None) -> str:
    """What the first row that is an object has instead, for the message."""
    if fields is None:
        return ""
    shown = [repr(name[:FIELD_SHOWN]) for name in fields[:FIELDS_SHOWN]]
    more = f" and {len(fields) - FIELDS_SHOWN} more" if len(fields) > FIELDS_SHOWN else ""
    return f"; the first row has {', '.join(shown) or 'no field'}{more}"
