"""The taps on a model of norms: what they take, what they prove, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from hsx.capture.model import FinalNorm, Layers
from hsx.capture.taps import PROOF_FORWARDS, Taps
from hsx.core.spec import CaptureSpec, FinalState

ROWS, WIDTH = 5, 4


class Norm(torch.nn.Module):
    """Adds and norms in one where it is given a residual, which it updates in place, as SGLang's do."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, *, quant_linear: object = None) -> object:
        if residual is None:
            return x / 2
        residual += x
        return residual / 2, residual


class Model:
    """h_k is k + 1 in every place; layer k adds one to it."""

    def __init__(self, layers: int = 4) -> None:
        self.norms = [Norm() for _ in range(layers)]
        self.final = FinalNorm(Norm(), 1e-6, None)

    def run(self, *, by_call: bool = True) -> tuple[list[torch.Tensor], torch.Tensor]:
        """All of h_0 to h_N-1 as a model may hand them out, and what its head gets."""
        one = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
        states = [one]
        residual = one.clone()
        first, *others = [norm if by_call else norm.forward for norm in [*self.norms, self.final.module]]
        head = first(one, quant_linear=self)
        for call in others:
            head, residual = call(one, residual=residual)
            states.append(residual.clone())
        return states[:-1], head


def taps(
    model: Model, layers: tuple[int, ...], handed_out: tuple[int, ...], final: FinalState = "post_norm", **options: bool
) -> Taps:
    norms: dict[int, torch.nn.Module] = {k: model.norms[k] for k in layers}
    how = Layers(torch.nn.Module(), "model" if handed_out else "norms", handed_out, norms)
    return Taps(CaptureSpec(layers, final), how, model.final, **options)


def test_what_the_model_does_not_hand_out_is_taken_at_the_norms_and_the_rest_is_proved() -> None:
    model = Model()
    taken = taps(model, (0, 1, 3), (1, 3), "pre_norm")
    with taken.watch():
        states, head = model.run()
        assert taken.problem([states[1], states[3]], head, ROWS) is None
        assert not taken.proving
        parts, final = taken.states([states[1], states[3]], head)
    assert [part[0, 0].item() for part in parts] == [1.0, 2.0, 4.0]
    assert final[0, 0].item() == 5.0
    # The proof is done once; what has to be taken is taken in each forward, and nothing stays in the model.
    with taken.watch():
        states, head = model.run()
        packed = torch.cat([states[1], states[3]], dim=1)
        parts, final = taken.states(packed, head)
    assert [part[0, 0].item() for part in parts] == [1.0, 2.0, 4.0]
    assert final[0, 0].item() == 5.0
    assert all(len(norm._forward_hooks) == 0 for norm in [*model.norms, model.final.module])


def test_a_model_without_a_setter_is_taken_at_its_norms() -> None:
    model = Model()
    taken = taps(model, (2, 3), ())
    with taken.watch():
        _, head = model.run()
        assert taken.problem(None, head, ROWS) is None
        parts, final = taken.states(None, head)
    assert [part[0, 0].item() for part in parts] == [3.0, 4.0]
    assert final is head


@pytest.mark.parametrize(("given", "wrong"), [((0, 3), "h_1"), ((1, 2), "h_3"), ((2, 3), "h_1")])
def test_another_layer_than_asked_for_is_found_out(given: tuple[int, int], wrong: str) -> None:
    model = Model()
    taken = taps(model, (1, 3), (1, 3))
    with taken.watch():
        states, head = model.run()
        problem = taken.problem([states[k] for k in given], head, ROWS)
    assert problem is not None
    assert problem.startswith(
        f"the model hands out something else for {wrong} than the input norm of layer {wrong[2:]} was given"
    )


def test_a_head_that_gets_something_else_than_the_norm_gave_is_found_out() -> None:
    model = Model()
    taken = taps(model, (1,), (1,))
    with taken.watch():
        states, head = model.run()
        problem = taken.problem([states[1]], head / 3, ROWS)
    assert problem is not None
    assert "something else for post_norm than the final norm gave" in problem
    # Where that is known of a model, the state is taken at the norm.
    taken = taps(model, (1,), (1,), from_norm=True)
    with taken.watch():
        states, head = model.run()
        assert taken.problem([states[1]], head / 3, ROWS) is None
        assert torch.equal(taken.states([states[1]], head / 3)[1], head)


def test_norms_that_do_not_run_as_modules_prove_nothing_and_give_nothing() -> None:
    model = Model()
    taken = taps(model, (1,), (1,))
    for _ in range(PROOF_FORWARDS):
        assert taken.proving
        with taken.watch():
            states, head = model.run(by_call=False)
            assert taken.problem([states[1]], head, ROWS) is None
    assert not taken.proving
    assert taken.states([states[1]], head)[0][0] is states[1]
    taken = taps(model, (0,), (), "pre_norm")
    with taken.watch():
        _, head = model.run(by_call=False)
        with pytest.raises(ValueError, match=r"the input norm of layer 0 ran 0 times as a module; expected once"):
            taken.states(None, head)


def test_a_norm_that_runs_twice_is_not_believed() -> None:
    model = Model()
    taken = taps(model, (2,), ())
    with taken.watch():
        model.run()
        _, head = model.run()
        with pytest.raises(ValueError, match="the input norm of layer 2 ran 2 times"):
            taken.states(None, head)


@pytest.mark.parametrize(
    ("dtype", "convert", "fits"),
    [
        (torch.bfloat16, False, True),
        (torch.float32, True, True),
        (torch.float16, True, True),
        (torch.float32, False, False),
        (torch.float64, True, False),
    ],
)
def test_a_dtype_is_rounded_where_that_is_wanted(dtype: torch.dtype, convert: bool, fits: bool) -> None:
    model = Model()
    taken = taps(model, (1,), (1,), convert=convert)
    state = torch.ones(ROWS, WIDTH, dtype=dtype)
    if fits:
        assert taken.states([state], state)[0][0] is state
    else:
        with pytest.raises(ValueError, match=f"h_1 is {dtype}; expected torch.bfloat16"):
            taken.states([state], state)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (None, "the model gave 0 layers; expected 2"),
        ([torch.ones(ROWS, WIDTH)] * 3, "the model gave 3 layers; expected 2"),
        (torch.ones(ROWS, WIDTH), r"packed aux states are \(5, 4\); expected \[rows, 2 \* 4\]"),
    ],
)
def test_more_or_fewer_layers_than_expected_are_refused(aux: torch.Tensor | list[torch.Tensor] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        taps(Model(), (1, 3), (1, 3)).states(aux, torch.ones(ROWS, WIDTH))
