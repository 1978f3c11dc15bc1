"""Datasets: JSONL of tokenised rows or of conversations, one adapter a file, behind `ports.Dataset`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from hsx.errors import RunError

if TYPE_CHECKING:
    from hsx.config import Config
    from hsx.core.spec import ModelShape
    from hsx.datasets.jsonl import JsonlFile
    from hsx.ports import Dataset

SERVER_MARGIN: Final = 8
"""Tokens of the context that SGLang keeps for itself (6 or 7, by version), rounded up."""

FIELDS_SHOWN: Final = 12
FIELD_SHOWN: Final = 40


def longest_allowed(config: Config, shape: ModelShape) -> int:
    """The longest sample in tokens: `dataset.max_tokens`, else the model's context length less `SERVER_MARGIN`."""
    return config.dataset.max_tokens or max(1, shape.context_length - SERVER_MARGIN)


def open_dataset(config: Config, shape: ModelShape) -> Dataset:
    """The dataset that the job file names; with format `auto` this reads as far as the first row that tells.

    Raises:
        RunError: `dataset_unreadable` where the file cannot be opened; `dataset_empty` where `auto` finds no row of a known
            form; `chat_unavailable` where conversations cannot be tokenised.
    """
    from hsx.datasets.jsonl import JsonlFile
    from hsx.datasets.rows import Limits

    file = JsonlFile(Path(config.dataset.path))
    if config.storage.tokens == "loss":
        from hsx.datasets.masked import MaskedRows

        whole = msgspec.structs.replace(config, storage=msgspec.structs.replace(config.storage, tokens="all", context=0))
        return MaskedRows(open_dataset(whole, shape))
    limits = Limits(shape.vocab_size, longest_allowed(config, shape))
    kind = detect_format(file) if config.dataset.format == "auto" else config.dataset.format
    if kind == "tokens":
        from hsx.datasets.tokens import TokenRows

        return TokenRows(file, limits)
    from hsx.datasets.chat import ChatRows
    from hsx.datasets.template import ChatTemplate

    template = Path(config.dataset.chat_template) if config.dataset.chat_template else None
    return ChatRows(file, limits, ChatTemplate(Path(config.model.path), template))


def detect_format(file: JsonlFile) -> Literal["tokens", "chat"]:
    """The format of the first row that has `input_ids`, `conversations` or `messages`; rows before it are passed over.

    Raises:
        RunError: `dataset_empty` where no row has any of them, `dataset_unreadable`.
    """
    from hsx.datasets.rows import Bad, fields_of

    lines = 0
    seen: list[str] | None = None
    for _, line in file.lines():
        lines += 1
        try:
            fields = fields_of(line)
        except Bad:
            continue
        seen = list(fields) if seen is None else seen
        if "input_ids" in fields:
            return "tokens"
        if "conversations" in fields or "messages" in fields:
            return "chat"
    raise RunError(
        "dataset_empty",
        f"{file.path}: none of {lines} row{'' if lines == 1 else 's'} has a field 'input_ids', 'conversations' or 'messages'"
        + _found(seen),
    )


def _found(fields: list[str] | None) -> str:
    """What the first row that is an object has instead, for the message."""
    if fields is None:
        return ""
    shown = [repr(name[:FIELD_SHOWN]) for name in fields[:FIELDS_SHOWN]]
    more = f" and {len(fields) - FIELDS_SHOWN} more" if len(fields) > FIELDS_SHOWN else ""
    return f"; the first row has {', '.join(shown) or 'no field'}{more}"
