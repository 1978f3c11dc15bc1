"""The dump's bytes: a safetensors header whose data begins on a page.

Written by the capture side inside the server, read by hsx; both use this module, so there is one definition. Tensor
`hidden_states` (bf16, [tokens, L, H], token-major) comes first and begins at a multiple of `ALIGNMENT`, so that O_DIRECT
can write straight from a mapping; `input_ids` (int32, [tokens]) follows it. All metadata values are strings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from hsx.core.epoch import MAX_RANKS
from hsx.core.marker import Marker, parse
from hsx.core.spec import CaptureSpec, bytes_per_token, final_state
from hsx.errors import SampleError

FORMAT: Final = "hsx-dump-1"
ALIGNMENT: Final = 4096
MAX_HEADER: Final = 1 << 20
ID_BYTES: Final = 4
SUFFIX: Final = ".safetensors"
PART_SUFFIX: Final = ".part"
ERROR_SUFFIX: Final = ".error"
_KEYS: Final = ("format", "marker", "epoch", "sequence", "tokens", "layers", "final", "hidden_size", "model", "engine", "rank")


@dataclass(frozen=True, slots=True)
class DumpHeader:
    """What a dump says of itself.

    Attributes:
        marker: the attempt that it belongs to.
        epoch: uuid of the server's life that wrote it.
        sequence: the capture counter, from 1, strictly rising within an epoch's DP rank.
        spec: the layers (read back from the model) and the final state.
        hidden_size: H.
        model: model name or path as the server was given it.
        engine: engine name and version, such as `sglang 0.5.23`.
        rank: the data-parallel rank that computed it and gave it its number; 0 without data parallelism.
    """

    marker: Marker
    epoch: str
    sequence: int
    spec: CaptureSpec
    hidden_size: int
    model: str
    engine: str
    rank: int = 0

    @property
    def tokens(self) -> int:
        """Rows of `hidden_states` and `input_ids`."""
        return self.marker.tokens

    @property
    def states_bytes(self) -> int:
        """Bytes of `hidden_states`."""
        return self.tokens * bytes_per_token(self.spec, self.hidden_size)

    @property
    def data_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.states_bytes + self.tokens * ID_BYTES


def dump_bytes(spec: CaptureSpec, hidden_size: int, tokens: int) -> int:
    """Bytes that the dump of a prompt takes in the dump directory: a page of header, then the data, in whole pages.

    A header of more than one page needs a spec of hundreds of layers or a model path of thousands of characters.

    Args:
        spec: what is captured.
        hidden_size: H.
        tokens: length of the prompt.
    """
    data = tokens * (bytes_per_token(spec, hidden_size) + ID_BYTES)
    return ALIGNMENT * (1 + -(-data // ALIGNMENT))


def encode_header(header: DumpHeader, at_least: int = 0) -> bytes:
    """The file's first bytes, up to where `hidden_states` begins; a multiple of `ALIGNMENT` long.

    Args:
        header: what the dump says of itself.
        at_least: pads to this many bytes, for a writer that placed the data before it knew the sequence.
    """
    shape = [header.tokens, header.spec.states, header.hidden_size]
    document = {
        "__metadata__": {
            "format": FORMAT,
            "marker": str(header.marker),
            "epoch": header.epoch,
            "sequence": str(header.sequence),
            "tokens": str(header.tokens),
            "layers": json.dumps(list(header.spec.layers)),
            "final": header.spec.final,
            "hidden_size": str(header.hidden_size),
            "model": header.model,
            "engine": header.engine,
            "rank": str(header.rank),
        },
        "hidden_states": {"dtype": "BF16", "shape": shape, "data_offsets": [0, header.states_bytes]},
        "input_ids": {
            "dtype": "I32",
            "shape": [header.tokens],
            "data_offsets": [header.states_bytes, header.data_bytes],
        },
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()
    padded = -(-max(8 + len(text), at_least) // ALIGNMENT) * ALIGNMENT
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)


def decode_header(prefix: bytes, file_size: int) -> tuple[DumpHeader, int]:
    """Reads a header out of a file's first bytes.

    Args:
        prefix: at least the first `8 + header length` bytes of the file; more is ignored.
        file_size: the whole file's size in bytes, which must equal what the header promises.

    Returns:
        The header, and the offset at which `hidden_states` begins.

    Raises:
        SampleError: kind `dump_invalid`, for every deviation; the message names the field.
    """
    if len(prefix) < 8:
        raise _invalid(f"file has {file_size} bytes; expected a safetensors header")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER or 8 + length > len(prefix):
        raise _invalid(f"header length is {length}; expected at most {min(MAX_HEADER, len(prefix) - 8)}")
    start = 8 + length
    if start % ALIGNMENT:
        raise _invalid(f"data begins at byte {start}; expected a multiple of {ALIGNMENT}")
    try:
        document: Any = json.loads(prefix[8:start])
        meta: dict[str, str] = document["__metadata__"]
        values = {key: meta[key] for key in _KEYS}
        if not all(isinstance(value, str) for value in values.values()):
            raise TypeError("a metadata value is not a string")
        sequence, tokens, hidden_size, rank = (int(values[k]) for k in ("sequence", "tokens", "hidden_size", "rank"))
        layers = tuple(json.loads(values["layers"]))
        tensors = {name: document[name] for name in ("hidden_states", "input_ids")}
        final = final_state(values["final"])
    except (ValueError, KeyError, TypeError) as error:
        raise _invalid(f"header is not a dump's: {type(error).__name__}: {error}") from error
    if values["format"] != FORMAT:
        raise _invalid(f"format is {values['format']!r}; expected {FORMAT!r}")
    marker = parse(values["marker"])
    if marker is None or marker.tokens != tokens:
        raise _invalid(f"marker is {values['marker']!r} with {tokens} tokens; expected a marker of that many tokens")
    if not all(type(k) is int for k in layers):
        raise _invalid(f"layers are {values['layers']}; expected integers")
    if sequence < 1 or hidden_size < 1:
        raise _invalid(f"sequence is {sequence}, hidden_size is {hidden_size}; expected at least 1")
    if not 0 <= rank < MAX_RANKS:
        raise _invalid(f"rank is {rank}; expected 0 to {MAX_RANKS - 1}")
    header = DumpHeader(
        marker=marker,
        epoch=values["epoch"],
        sequence=sequence,
        spec=CaptureSpec(layers=layers, final=final),
        hidden_size=hidden_size,
        model=values["model"],
        engine=values["engine"],
        rank=rank,
    )
    expected = {
        "hidden_states": ("BF16", [tokens, header.spec.states, hidden_size], [0, header.states_bytes]),
        "input_ids": ("I32", [tokens], [header.states_bytes, header.data_bytes]),
    }
    for name, wanted in expected.items():
        entry = tensors[name]
        found = (entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")) if isinstance(entry, dict) else None
        if found != wanted:
            raise _invalid(f"tensor {name} is {found}; expected {wanted}")
    if file_size != start + header.data_bytes:
        raise _invalid(f"file has {file_size} bytes; expected {start + header.data_bytes}")
    return header, start


def _invalid(reason: str) -> SampleError:
    return SampleError("dump_invalid", f"dump is invalid: {reason}")
