"""Whether transformers gives text the tokens that `tokenizer.json` says: trainers and servers load tokenizers through it.

transformers replaces parts of some tokenizers without a word (the pre-tokenizer of one labelled LlamaTokenizerFast). hsx reads
`tokenizer.json` alone; where the others would see other tokens, its states belong to prompts that they never make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hsx.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.datasets.tokenizer import RawTokenizer

PROBES: Final = (
    "How are you doing?  12345 naïve 日本語\n\n\tif x:",
    "Привет, κόσμε! שלום مرحبا नमस्ते สวัสดี 안녕하세요 こんにちは 你好",
    "👩‍👩‍👧 🇨🇭 👍🏽 ☕️ \U0001d4b3",  # joined, paired, modified, beyond 16 bits
    " a  b   c\t\td\n\n\n e\r\nf\u00a0g\u3000h  ",
    "0 12 345 6789 1234567890 3.14159 1e-9 ٣٤ ½",
    "def f(x):\n    return x**2  # it's, don't, WE'LL\n",
)
TOKENS_TRIED: Final = 16
"""Special tokens of which each is tried within text."""
SHOWN: Final = 24


@dataclass(frozen=True, slots=True)
class Difference:
    """A text that two tokenizers see differently: its ids as transformers gives them, and as `tokenizer.json` does."""

    text: str
    theirs: list[int]
    ours: list[int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it.

    Attributes:
        loaded: the class that transformers made; "" where it could not load the tokenizer.
        problem: why it could not.
        difference: the first probe on which they differ.
    """

    loaded: str = ""
    problem: str = ""
    difference: Difference | None = None

    def __str__(self) -> str:
        if self.difference:
            return f"not as transformers loads it ({self.loaded})"
        return f"as transformers loads it ({self.loaded})" if self.loaded else f"not compared with transformers: {self.problem}"


def probes_of(tokenizer: RawTokenizer) -> list[str]:
    """The texts that are compared: `PROBES`, and the tokenizer's own special tokens within text."""
    tokens = list(dict.fromkeys([*tokenizer.special.values(), *tokenizer.added]))[:TOKENS_TRIED]
    return [*PROBES, *(f"Hi{token}there {token}\n" for token in tokens if token)]


def compare(tokenizer: RawTokenizer) -> Comparison:
    """Compares a tokenizer with what transformers makes of its folder. Nothing is downloaded, no code of the folder run."""
    try:
        theirs = _load(tokenizer.folder)
    except ImportError as error:
        return Comparison(problem=str(error))
    except Exception as error:  # noqa: BLE001 - whatever its many classes raise, it says that transformers cannot load it
        return Comparison(problem=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
    name = type(theirs).__name__
    for text in probes_of(tokenizer):
        ours = tokenizer.encode(text)[0]
        found = list(theirs.encode(text, add_special_tokens=False))
        if found != ours:
            return Comparison(name, difference=Difference(text, found, ours))
    return Comparison(name)


def require_agreement(tokenizer: RawTokenizer) -> None:
    """Raises RunError `chat_unavailable` where transformers loads the tokenizer and gives a probe other tokens."""
    found = compare(tokenizer)
    if found.difference is None:
        return
    text, theirs, ours = found.difference.text, found.difference.theirs, found.difference.ours
    raise RunError(
        "chat_unavailable",
        f"{tokenizer.folder}: transformers' AutoTokenizer ({found.loaded}) gives {text!r} the ids {_shown(theirs)}; "
        f"tokenizer.json gives {_shown(ours)}. Trainers and servers that load it so see other tokens than hsx extracts. "
        "tokenizer_class = 'PreTrainedTokenizerFast' in tokenizer_config.json makes transformers read tokenizer.json alone; "
        "dataset.tokenizer_differs = 'allow' goes on with the ids of tokenizer.json",
    )


def _load(folder: Path) -> Any:  # noqa: ANN401 - one of many classes
    from transformers import AutoTokenizer
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # its advice is not on hsx's use of it
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    finally:
        logging.set_verbosity(before)


def _shown(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:SHOWN]))}{', ...' if len(ids) > SHOWN else ''}]"
