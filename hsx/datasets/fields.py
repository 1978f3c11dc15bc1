"""The fields of one row, whatever the file: decoded one by one, and only those that are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from hsx.core.json_words import in_words, kind_of, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INTEGERS: Final = msgspec.json.Decoder(list[int])
_FLAGS: Final = msgspec.json.Decoder(list[int | bool])
_KINDS: Final = {"[": "list", "{": "object", '"': "text", "t": "boolean", "f": "boolean", "n": "null"}


class Bad(Exception):  # noqa: N818 - a row's verdict on its way to becoming a BadRow, not an error of the program
    """This row cannot be used.

    Args:
        reason: one of the reasons of `hsx.records.BadRow`.
        message: expected and found.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Fields(Protocol):
    """One row."""

    def types(self) -> dict[str, str]:
        """The names of all its fields, with the type of each in words."""
        ...

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        ...

    def value(self, name: str) -> Any:  # noqa: ANN401 - JSON is any of several types
        """The field as Python values. Raises Bad `missing_field` (also for null), `not_json` or `bad_type`."""
        ...

    def integers(self, name: str, *, flags: bool = False) -> list[int] | NDArray[np.int64]:
        """The field as a list of integers; with `flags` booleans are taken as 0 and 1.

        Raises Bad `missing_field`, `bad_type`, `out_of_vocabulary` (thousands of digits) or `not_json`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Columns:
    """Which field is what; the defaults are the names that most datasets use.

    Attributes:
        id: the sample's id.
        input_ids: token ids.
        loss_mask: 1 for each token that counts.
        labels: the token's own id where it counts, -100 elsewhere.
        prompt_length: how many tokens at the beginning do not count.
        messages: the turns of a conversation.
        conversations: likewise, in ShareGPT's form.
        tools: the functions that the model may call.
        text: a conversation that was formatted beforehand.
    """

    id: str = "id"
    input_ids: str = "input_ids"
    loss_mask: str = "loss_mask"
    labels: str = "labels"
    prompt_length: str = "prompt_length"
    messages: str = "messages"
    conversations: str = "conversations"
    tools: str = "tools"
    text: str = "text"


class JsonFields:
    """The fields of a JSON object; of duplicate keys the last one.

    Raises Bad `not_json` or `bad_type`.
    """

    __slots__ = ("_raw",)

    def __init__(self, line: bytes) -> None:
        try:
            self._raw = _FIELDS.decode(line)
        except msgspec.ValidationError as error:
            raise Bad("bad_type", f"the line is not a JSON object: {in_words(str(error))}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            # Decoders call the missing half of a surrogate pair anything from truncated to malformed.
            hint = " (a lone surrogate?)" if b"\\ud" in line.lower() else ""
            raise Bad("not_json", f"{error}{hint}; the line begins with {excerpt(line)}") from error

    def types(self) -> dict[str, str]:
        """See `Fields`."""
        return {name: _KINDS.get(bytes(memoryview(raw)[:1]).decode(), "number") for name, raw in self._raw.items()}

    def has(self, name: str) -> bool:
        """See `Fields`."""
        raw = self._raw.get(name)
        return raw is not None and bytes(memoryview(raw)[:1]) != b"n"

    def value(self, name: str) -> Any:  # noqa: ANN401 - JSON is any of several types
        """See `Fields`; `not_json` also for a lone surrogate."""
        raw = self._given(name)
        try:
            return msgspec.json.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            found = excerpt(bytes(raw))
            raise Bad(
                "not_json", f"field {name!r} cannot be decoded (a lone surrogate or a huge number): {error}; {found}"
            ) from error

    def integers(self, name: str, *, flags: bool = False) -> list[int]:
        """See `Fields`."""
        raw = self._given(name)
        try:
            return _FLAGS.decode(raw) if flags else _INTEGERS.decode(raw)
        except msgspec.ValidationError as error:
            if "out of range" in str(error):  # thousands of digits: an integer, but no id
                raise Bad("out_of_vocabulary", f"field {name!r}: {in_words(str(error))}") from error
            raise Bad("bad_type", f"field {name!r} is not a list of integers: {in_words(str(error))}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise Bad("not_json", f"field {name!r}: {error}") from error

    def _given(self, name: str) -> msgspec.Raw:
        raw = self._raw.get(name)
        if raw is None or bytes(memoryview(raw)[:1]) == b"n":
            raise Bad("missing_field", f"field {name!r} is {'missing' if raw is None else 'null'}")
        return raw


def excerpt(text: bytes, longest: int = 60) -> str:
    """The beginning of a text, quoted."""
    shown = text[:longest].decode("utf-8", "replace")
    return repr(shown) + ("..." if len(text) > longest else "")


def brief(value: object, longest: int = 60) -> str:
    """A value for a message: as JSON writes it, and where it is long what it is, too."""
    text = shown(value)
    if isinstance(value, int | float | str | None) and len(text) <= longest:
        return text
    return f"{text[:longest]}{'...' if len(text) > longest else ''} ({kind_of(value)})"
