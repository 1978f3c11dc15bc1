"""A model's own chat template and tokenizer: conversations to token ids and to the spans of the assistant's text.

Stock templates do not mark the assistant's text, and some drop turns without a word. So every conversation is rendered
twice: as it is, and with each piece of its text replaced by a placeholder. The second rendering shows what the template
itself writes and where each turn's text goes; the first must then be exactly that frame filled with the real text. Where
it is not (a template that drops, rewrites or escapes text), the row is refused instead of guessed at.

Text is encoded with the raw `tokenizers` tokenizer of `tokenizer.json`: transformers replaces the pre-tokenizer of some
models with a wrong one.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tokenizers import Tokenizer

# Tags that templates look for inside a turn's text; they stay in the frame, so that the template decides alike on both.
_TAGS: Final = re.compile(r"(</?(?:think|tool_call|tool_response)>)")
_PLACEHOLDER: Final = re.compile("\ue0f0([0-9]+)\ue0f1")
PROBE: Final = "How are you doing?  12345 naïve 日本語\n\n\tif x:"


_Places = list[tuple[int, int]]


class TemplateError(Exception):
    """This conversation cannot be rendered, or not be told apart from the template's own text; the message says why."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: `role` as the template knows it, and its text."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the whole rendering.
        spans: [start, end) in characters of each assistant turn: what the model writes after the generation prompt, with the
            end-of-turn token where the template writes one.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Segment:
    turn: int
    text: str
    optional: bool  # thinking: templates remove it from earlier turns


class ChatTemplate:
    """The tokenizer and chat template of a model folder.

    Args:
        model: folder with `tokenizer.json` and, with the template, `tokenizer_config.json` or `chat_template.jinja`.
        override: a Jinja file that replaces the model's template.

    Raises:
        RunError: `chat_unavailable` where the extra `chat`, the tokenizer or a template is missing, or the tokenizer
            contradicts its own configuration.
    """

    def __init__(self, model: Path, override: Path | None = None) -> None:
        try:
            import jinja2
            from tokenizers import Tokenizer
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise RunError("chat_unavailable", f"{error}; conversations need hsx with its extra 'chat'") from error
        file = model / "tokenizer.json"
        if not file.is_file():
            raise RunError(
                "chat_unavailable", f"{file} does not exist; expected a fast tokenizer (or tokenise the dataset beforehand)"
            )
        settings = _settings(model / "tokenizer_config.json")
        self._template = _template(model, settings, override)
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
            special = {
                key: _token_text(settings[key])
                for key in ("bos_token", "eos_token", "unk_token", "pad_token")
                if settings.get(key)
            }
            self._renderer = PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=self._template, **special)
        except Exception as error:  # for a damaged file tokenizers raises bare Exception, and nothing narrower
            raise RunError("chat_unavailable", f"{file} cannot be loaded: {error}") from error
        # A template is a program: it fails on what it is given as any Python expression does, or says no by raise_exception.
        self._failures = (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        )
        # A saved truncation would cut every sample without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _check(self._tokenizer, settings, file)
        self._hash = hashlib.sha256(file.read_bytes()).hexdigest()
        self._special = sorted(
            (token.content for token in self._tokenizer.get_added_tokens_decoder().values()), key=len, reverse=True
        )

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of `tokenizer.json` and of the template's text."""
        template = hashlib.sha256(self._template.encode()).hexdigest()
        return {"dataset.tokenizer": self._hash, "dataset.chat_template": template}

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and their [start, end) characters in `text`; no special token is added, the template wrote them."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def render(self, turns: list[Turn]) -> Rendered:
        """Renders a conversation and finds the assistant's text in it.

        Raises:
            TemplateError: the template refuses the conversation, drops or rewrites a turn's text, or its frame is ambiguous.
        """
        text = self._apply(turns)
        segments, framed = _framed(turns)
        frame = self._apply(framed)
        pieces = _PLACEHOLDER.split(frame)
        literals, order = pieces[::2], [int(number) for number in pieces[1::2]]
        for number, segment in enumerate(segments):
            shown = order.count(number)
            turn = turns[segment.turn]
            if shown == 0 and not segment.optional:
                raise TemplateError(f"the template leaves out the text of turn {segment.turn + 1} (role {turn.role!r})")
            if shown > 1 and turn.role == "assistant":
                raise TemplateError(
                    f"the template writes the text of turn {segment.turn + 1} (role {turn.role!r}) {shown} times"
                )
        places = _filled(text, literals, [segments[number].text for number in order])
        if places is None:
            raise TemplateError("the rendering is not the template's own text with the turns' text in it: a turn was rewritten")
        return Rendered(text, tuple(self._spans(turns, framed, segments, text, order, places)))

    def _spans(
        self, turns: list[Turn], framed: list[Turn], segments: list[_Segment], text: str, order: list[int], places: _Places
    ) -> Iterator[tuple[int, int]]:
        bounds: dict[int, tuple[int, int]] = {}
        floor: dict[int, int] = {}
        end_before = 0
        for number, (start, end) in zip(order, places, strict=True):
            turn = segments[number].turn
            first, _ = bounds.get(turn, (start, end))
            floor.setdefault(turn, end_before)
            bounds[turn] = (min(first, start), end)
            end_before = end
        for turn, (first, last) in sorted(bounds.items()):
            if turns[turn].role == "assistant":
                before, after = _edges(framed[turn].content)
                start = first - len(before) if text.endswith(before, floor[turn], first) else first
                end = last + len(after) if text.startswith(after, last) else last
                prompt = self._prompt_of(turns[:turn])
                at = text.rfind(prompt, floor[turn], start) if prompt else -1
                yield (at + len(prompt) if at >= 0 else start), end + self._end_of_turn(text, end)

    def _prompt_of(self, turns: list[Turn]) -> str:
        """What the template adds to make the model speak after `turns`; "" where that cannot be told."""
        try:
            without, prompted = self._apply(turns), self._apply(turns, prompt=True)
        except TemplateError:
            return ""
        return prompted[len(without) :] if prompted.startswith(without) else ""

    def _end_of_turn(self, text: str, end: int) -> int:
        """Length of the white space and special token that follow the assistant's text; 0 where none does."""
        gap = len(text[end:]) - len(text[end:].lstrip())
        token = next((token for token in self._special if text.startswith(token, end + gap)), None)
        return gap + len(token) if token else 0

    def _apply(self, turns: list[Turn], *, prompt: bool = False) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            text = self._renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except self._failures as error:
            raise TemplateError(f"the template refuses the conversation: {type(error).__name__}: {error}") from error
        return str(text)


def _framed(turns: list[Turn]) -> tuple[list[_Segment], list[Turn]]:
    """The conversation with a placeholder for every piece of text, and what the placeholders stand for."""
    segments: list[_Segment] = []
    framed = []
    for index, turn in enumerate(turns):
        parts = _TAGS.split(turn.content)
        for at in range(0, len(parts), 2):
            if parts[at].strip():
                optional = turn.role == "assistant" and at > 0 and parts[at - 1] == "<think>"
                bare = parts[at].strip()
                lead, _, trail = parts[at].partition(bare)
                segments.append(_Segment(index, bare, optional))
                # White space around the text stays in the frame: the template strips it on both sides, or on neither.
                parts[at] = f"{lead}\ue0f0{len(segments) - 1}\ue0f1{trail}"
        framed.append(Turn(turn.role, "".join(parts)))
    return segments, framed


def _edges(framed: str) -> tuple[str, str]:
    """The tags before the first and after the last placeholder of a turn, which are its text as well."""
    pieces = _PLACEHOLDER.split(framed)
    return pieces[0].lstrip(), pieces[-1].rstrip()


def _filled(text: str, literals: list[str], fillings: list[str]) -> _Places | None:
    """Where each filling stands in `text`, when `text` is the literals with the fillings between them; else None."""
    places = []
    position = len(literals[0])
    if not text.startswith(literals[0]):
        return None
    for filling, literal in zip(fillings, literals[1:], strict=True):
        end = position + len(filling)
        if not text.startswith(filling, position) or not text.startswith(literal, end):
            return None
        places.append((position, end))
        position = end + len(literal)
    return places if position == len(text) else None


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError("chat_unavailable", f"{file} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise RunError("chat_unavailable", f"{file} holds a {type(settings).__name__}; expected a JSON object")
    return settings


def _template(model: Path, settings: dict[str, Any], override: Path | None) -> str:
    file = override or model / "chat_template.jinja"
    if override or file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError("chat_unavailable", f"chat template {file} cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get("default")
    if not isinstance(template, str) or not template:
        raise RunError(
            "chat_unavailable",
            f"{model} has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json; "
            "set dataset.chat_template",
        )
    return template


def _token_text(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _check(tokenizer: Tokenizer, settings: dict[str, Any], file: Path) -> None:
    """The probe must survive a round trip, and special tokens must be the ids that the configuration says."""
    decoded = tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False).ids, skip_special_tokens=False)
    if "".join(decoded.split()) == "".join(PROBE.split()) and decoded.split() != PROBE.split():
        raise RunError("chat_unavailable", f"{file} loses white space: {PROBE!r} comes back as {decoded!r}")
    declared = settings.get("added_tokens_decoder")
    for number, token in declared.items() if isinstance(declared, dict) else ():
        text = _token_text(token)
        if tokenizer.token_to_id(text) != int(number):
            raise RunError(
                "chat_unavailable",
                f"{file} gives the token {text!r} the id {tokenizer.token_to_id(text)}; tokenizer_config.json says {number}",
            )
