"""The dump header: readable by safetensors itself, and refused for every deviation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from hsx.core.dump import ALIGNMENT, DumpHeader, decode_header, dump_bytes, encode_header
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.errors import SampleError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HEADER = DumpHeader(Marker("0a1b2c3d", 7, 2, 5), "e1", 3, CaptureSpec((1, 4), "post_norm"), 8, "model", "sglang 0.5.23")
SIZE = ALIGNMENT + HEADER.data_bytes


@given(
    st.integers(1, 5000),
    st.lists(st.integers(0, 200), min_size=1, max_size=6, unique=True).map(sorted),
    st.sampled_from(["post_norm", "pre_norm"]),
    st.integers(1, 20000),
    st.text(max_size=200),
)
def test_round_trip(tokens: int, layers: list[int], final: Any, width: int, model: str) -> None:
    header = DumpHeader(Marker("0a1b2c3d", 1, 1, tokens), "e", 9, CaptureSpec(tuple(layers), final), width, model, "x")
    prefix = encode_header(header)
    assert len(prefix) % ALIGNMENT == 0
    assert decode_header(prefix + b"more", len(prefix) + header.data_bytes) == (header, len(prefix))


@pytest.mark.parametrize("tokens", [1, 78, 79, 4096])
def test_a_dumps_size_is_known_before_it_is_written(tokens: int) -> None:
    header = DumpHeader(Marker("0a1b2c3d", 7, 2, tokens), "e1", 3, HEADER.spec, 8, "model", "sglang 0.5.23")
    size = len(encode_header(header)) + header.data_bytes
    assert dump_bytes(HEADER.spec, 8, tokens) == (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def test_safetensors_reads_a_dump(tmp_path: Path) -> None:
    states = np.arange(5 * 3 * 8, dtype=np.uint16)
    ids = np.array([4, 5, 6, 7, 8], np.int32)
    path = tmp_path / "d.safetensors"
    path.write_bytes(encode_header(HEADER) + states.tobytes() + ids.tobytes())
    with safe_open(path, "pt") as file:
        assert file.get_tensor("hidden_states").shape == (5, 3, 8)
        assert file.get_tensor("hidden_states").view(-1).view(dtype=file.get_tensor("hidden_states").dtype).numel() == 120
        assert file.get_tensor("input_ids").tolist() == ids.tolist()
        assert file.metadata()["marker"] == str(HEADER.marker)


def rewritten(change: Callable[[dict[str, Any]], None]) -> bytes:
    document = json.loads(encode_header(HEADER)[8:])
    change(document)
    text = json.dumps(document).encode().ljust(ALIGNMENT - 8)
    return (ALIGNMENT - 8).to_bytes(8, "little") + text


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "format": lambda d: d["__metadata__"].update(format="hsx-dump-2"),
    "marker": lambda d: d["__metadata__"].update(marker="HEALTH_CHECK_1"),
    "tokens": lambda d: d["__metadata__"].update(tokens="6"),
    "tokens not a number": lambda d: d["__metadata__"].update(tokens="five"),
    "sequence": lambda d: d["__metadata__"].update(sequence="0"),
    "layers": lambda d: d["__metadata__"].update(layers='["a", "b"]'),
    "final": lambda d: d["__metadata__"].update(final="normed"),
    "epoch missing": lambda d: d["__metadata__"].pop("epoch"),
    "value not a string": lambda d: d["__metadata__"].update(epoch=1),
    "no metadata": lambda d: d.pop("__metadata__"),
    "dtype": lambda d: d["hidden_states"].update(dtype="F16"),
    "shape": lambda d: d["hidden_states"].update(shape=[5, 3, 9]),
    "offsets": lambda d: d["input_ids"].update(data_offsets=[0, 20]),
    "no ids": lambda d: d.pop("input_ids"),
    "tensor not a table": lambda d: d.update(input_ids=[1]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_deviation_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(SampleError) as caught:
        decode_header(rewritten(change), SIZE)
    assert caught.value.kind == "dump_invalid"


@pytest.mark.parametrize("size", [0, 7, ALIGNMENT, SIZE - 1, SIZE + 1])
def test_a_file_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(SampleError, match="dump is invalid"):
        decode_header(encode_header(HEADER)[:size], size)


@given(st.binary(max_size=300))
def test_noise_is_refused_and_nothing_else_is_raised(noise: bytes) -> None:
    with pytest.raises(SampleError) as caught:
        decode_header(noise, len(noise))
    assert caught.value.kind == "dump_invalid"
