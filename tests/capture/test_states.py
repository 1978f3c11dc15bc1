"""From the model's tensors to the stored block."""

from __future__ import annotations

import pytest
import torch

from hsx.capture.states import copy_rows, split_states


def stack_states(
    aux: torch.Tensor | list[torch.Tensor] | None, final: torch.Tensor, rows: int, layers: int, dtype: torch.dtype
) -> torch.Tensor:
    """The block as it is in a host buffer, [rows, layers + 1, H]."""
    out = torch.empty(rows, layers + 1, final.shape[-1], dtype=dtype)
    copy_rows(split_states(aux, final, rows, layers), 0, out)
    return out


def layers(rows: int) -> list[torch.Tensor]:
    return [torch.full((rows, 4), float(k)) for k in (1, 2)]


@pytest.mark.parametrize("packed", [False, True])
def test_list_and_packed_give_the_same_block(packed: bool) -> None:
    aux = [torch.arange(12.0).reshape(3, 4), torch.arange(12.0, 24.0).reshape(3, 4)]
    final = torch.arange(24.0, 36.0).reshape(3, 4)
    block = stack_states(torch.cat(aux, 1) if packed else aux, final, 3, 2, torch.float32)
    assert block.shape == (3, 3, 4)
    assert torch.equal(block[:, 0], aux[0])
    assert torch.equal(block[:, 1], aux[1])
    assert torch.equal(block[:, 2], final)


def test_padding_is_cut_off() -> None:
    block = stack_states(layers(8), torch.zeros(9, 4), 5, 2, torch.float32)
    assert block.shape == (5, 3, 4)


def test_rounding_is_to_nearest() -> None:
    value = torch.tensor([[1.00390625 + 1e-4]])  # just above half way between two bf16 values, 1 and 1.0078125
    assert stack_states([value], value, 1, 1, torch.bfloat16)[0, 0, 0].item() == 1.0078125


def test_block_shares_no_memory() -> None:
    aux, final = layers(2), torch.zeros(2, 4)
    block = stack_states(aux, final, 2, 2, torch.float32)
    final += 7
    aux[0] += 7
    assert block[:, 2].sum() == 0
    assert (block[:, 0] == 1).all()


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (None, "the model gave 0 layers; expected 2"),
        (layers(5)[:1], "the model gave 1 layers; expected 2"),
        (torch.zeros(5, 9), r"packed aux states are \(5, 9\); expected \[rows, 2 \* 4\]"),
        (layers(4), r"states are \(4, 4\); expected at least 5 rows of 4"),
        ([torch.zeros(5, 3)] * 2, r"states are \(5, 3\); expected at least 5 rows of 4"),
    ],
)
def test_other_shapes_are_refused(aux: torch.Tensor | list[torch.Tensor] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stack_states(aux, torch.zeros(5, 4), 5, 2, torch.float32)
