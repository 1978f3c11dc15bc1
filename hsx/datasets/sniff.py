"""What a dataset looks like, for people to see before anything is done with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hsx.core.amounts import in_words
from hsx.datasets import detect_format, naming_of, open_source
from hsx.datasets.fields import Bad
from hsx.datasets.masks import MASKS

if TYPE_CHECKING:
    from hsx.config import Config
    from hsx.datasets.fields import Columns

USED: Final = {"tokens": ("input_ids", *MASKS), "chat": ("messages", "conversations", "tools"), "text": ("text",)}
IGNORED_SHOWN: Final = 8
FIELDS_SHOWN: Final = 40
LONGEST_SHOWN: Final = 80
SYSTEM: Final = "system"
ALL_COUNT: Final = "every token counts for the loss"
SUCH_COUNT: Final = "every token of such a row counts for the loss"


@dataclass(frozen=True, slots=True)
class Sniffed:
    """A dataset's schema, told from its first row, and what is made of it.

    Attributes:
        kind: how the files are written: `jsonl`, `parquet` or `arrow`.
        files: their names, in order.
        nbytes: bytes of all of them.
        ignored: files of the folder that are not read.
        format: `tokens`, `chat` or `text`.
        told: whether that was told from the first row, and not said by the job file.
        fields: each field of the first row, with its type.
        used: what each field that is used is taken as.
        notes: what one may not expect.
    """

    kind: str
    files: tuple[str, ...]
    nbytes: int
    ignored: tuple[str, ...]
    format: str
    told: bool
    fields: dict[str, str] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """As text, one fact a line; names in it may hold anything, line ends included."""
        count = len(self.files)
        where = self.files[0] if count == 1 else f"{count} files, {self.files[0]} to {self.files[-1]}"
        skipped = ", ".join(self.ignored[:IGNORED_SHOWN])
        skipped += " ..." if len(self.ignored) > IGNORED_SHOWN else ""
        # What is used comes first: a table may have thousands of columns.
        ordered = sorted(self.fields, key=lambda name: name not in self.used)
        schema = [
            f"{_short(name)}: {_short(self.fields[name])}" + (f" as {self.used[name]}" if name in self.used else "")
            for name in ordered[:FIELDS_SHOWN]
        ]
        schema += [f"{len(ordered) - FIELDS_SHOWN} more"] if len(ordered) > FIELDS_SHOWN else []
        return [
            f"dataset    {where}, {self.kind}, {in_words(self.nbytes)}" + (f"; not read: {skipped}" if skipped else ""),
            f"format     {self.format}" + (", told from the first row" if self.told else ", as the job file says"),
            f"fields     {'; '.join(schema) or 'none'}",
            *(f"note       {note}" for note in self.notes),
        ]


def sniff(config: Config) -> Sniffed:
    """Looks at the dataset of a job file: reads as far as the first row that can be read.

    Raises RunError as `open_dataset` does, but for the tokenizer.
    """
    source = open_source(config)
    naming = naming_of(config)
    told = config.dataset.format == "auto"
    form = detect_format(source, naming.columns) if config.dataset.format == "auto" else config.dataset.format
    first = next((fields for _, fields in source.records() if not isinstance(fields, Bad)), None)
    types = first.types() if first is not None else {}
    used = {getattr(naming.columns, role): role for role in USED[form] if getattr(naming.columns, role) in types}
    if not naming.number_ids and naming.columns.id in types:
        used[naming.columns.id] = "id"
    return Sniffed(
        source.kind,
        source.found.names,
        sum(path.stat().st_size for path in source.found.paths),
        source.found.ignored,
        form,
        told,
        types,
        used,
        tuple(_notes(config, naming.columns, form, set(types), source.kind)),
    )


def _short(text: str) -> str:
    """A name or a type, not too long."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _notes(config: Config, columns: Columns, form: str, names: set[str], kind: str) -> list[str]:
    notes = []
    if config.dataset.ids == "number":
        notes.append("ids are the rows' places, from 0")
    elif columns.id not in names:
        notes.append(f"the first row has no field {columns.id!r}: set dataset.columns.id, or dataset.ids = 'number'")
    others = [role for role in ("input_ids", "messages", "conversations", "text") if role not in USED[form]]
    if left := [getattr(columns, role) for role in others if getattr(columns, role) in names]:
        notes.append(f"{', '.join(left)} could be read as well; dataset.format chooses")
    if form == "chat" and SYSTEM in names:
        notes.append(f"the field {SYSTEM!r} is not read; expected as the first turn where it is to be seen")
    if form == "tokens" and not any(getattr(columns, role) in names for role in MASKS):
        lacking = "no loss mask, labels or prompt length"
        # Rows of JSON may each have other fields.
        notes.append(f"the first row has {lacking}: {SUCH_COUNT}" if kind == "jsonl" else f"{lacking}: {ALL_COUNT}")
    if form == "text" and not config.dataset.text_markers:
        notes.append(f"no dataset.text_markers: {ALL_COUNT}")
    if {columns.messages, columns.conversations} <= names and form == "chat":
        notes.append(f"{columns.messages} is read, {columns.conversations} is not")
    return notes
