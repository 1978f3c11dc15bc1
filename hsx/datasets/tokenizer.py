"""The tokenizer of a model folder, as its `tokenizer.json` says, and a test of it before anything is encoded.

The raw `tokenizers` tokenizer is used: transformers replaces the pre-tokenizer of some models with a wrong one.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from hsx.core.json_words import kind_of
from hsx.datasets.fields import Bad
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenizers import Tokenizer

PROBE: Final = "How are you doing?  12345 naïve 日本語\n\n\tif x:"
SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
SHRINK: Final = 4
"""Characters that a normaliser may make one of; NFC composes up to three."""


class RawTokenizer:
    """The tokenizer of a model folder.

    Args:
        model: folder with `tokenizer.json`, and `tokenizer_config.json` where the model has one.

    Attributes:
        folder: the model's.
        settings: what `tokenizer_config.json` says.
        special: text of the tokens that it names: `bos_token` and its like.
        sha256: hash of `tokenizer.json`.

    Raises:
        RunError: `chat_unavailable` where the extra `chat` or the tokenizer is missing, or the tokenizer fails its test: the
            probe must survive a round trip, and special tokens must have the ids that the configuration says.
    """

    def __init__(self, model: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise RunError("chat_unavailable", f"{error}; text and conversations need hsx with its extra 'chat'") from error
        file = model / "tokenizer.json"
        if not file.is_file():
            raise RunError(
                "chat_unavailable", f"{file} does not exist; expected a fast tokenizer (or tokenise the dataset beforehand)"
            )
        self.folder = model
        self.settings = _settings(model / "tokenizer_config.json")
        self.special = {name: token_text(self.settings[name]) for name in SPECIAL_NAMES if self.settings.get(name)}
        try:
            content = file.read_bytes()
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # for a damaged file tokenizers raises bare Exception, and nothing narrower
            raise RunError("chat_unavailable", f"{file} cannot be loaded: {error}") from error
        # A saved truncation would cut every sample without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._test(file)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.added = sorted((token.content for token in added), key=len, reverse=True)
        self._widest: int | None = None
        self._start = self._tokenizer.token_to_id(self.special["bos_token"]) if "bos_token" in self.special else None

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and their [start, end) characters in `text`; no special token is added. Raises Bad `bad_type` for text that
        is not valid Unicode.
        """
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise Bad("bad_type", f"the text is not valid Unicode: {error}") from error
        return encoding.ids, encoding.offsets

    def require_room(self, text: str, most: int) -> None:
        """Raises Bad `too_long` for a text that no `most` tokens can make up: megabytes take long to encode."""
        if self._widest is None:
            self._widest = max(map(len, self._tokenizer.get_vocab()), default=1)
        if len(text) > most * self._widest * SHRINK:
            raise Bad("too_long", f"the row has {len(text)} characters, more than {most} tokens can have")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def require_single_start(self, ids: Sequence[int]) -> None:
        """Raises Bad `doubled_start` where the row begins with the beginning-of-text token twice."""
        if self._start is not None and list(ids[:2]) == [self._start, self._start]:
            token = self.special["bos_token"]
            raise Bad("doubled_start", f"the row begins with {token!r} twice; expected once: take it out of the text")

    def _test(self, file: Path) -> None:
        decoded = self.decode(self.encode(PROBE)[0])
        if "".join(decoded.split()) == "".join(PROBE.split()) and decoded.split() != PROBE.split():
            raise RunError("chat_unavailable", f"{file} loses white space: {PROBE!r} comes back as {decoded!r}")
        declared = self.settings.get("added_tokens_decoder")
        for number, token in declared.items() if isinstance(declared, dict) else ():
            text = token_text(token)
            if self._tokenizer.token_to_id(text) != int(number):
                raise RunError(
                    "chat_unavailable",
                    f"{file} gives the token {text!r} the id {self._tokenizer.token_to_id(text)}; tokenizer_config.json says "
                    f"{number}",
                )


def token_text(token: object) -> str:
    """A token of a configuration: its text, or an object with it."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError("chat_unavailable", f"{file} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise RunError("chat_unavailable", f"{file} holds {kind_of(settings)}; expected a JSON object")
    return settings
