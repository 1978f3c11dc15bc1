"""Recomputes stored samples with transformers in float32, on the CPU: the proof that does not trust the server.

The measure is the relative error per token, |stored - recomputed| / |recomputed|, because trained models have tokens hundreds
of times larger than the others, and neighbouring layers with cosines near 1.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hsx.errors import RunError
from hsx.stores.fp8 import converted, row_error
from hsx.stores.reader import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    import torch
    from torch import Tensor

    from hsx.stores.group import StoreInfo
    from hsx.stores.sample import StoredSample

TOLERANCE: Final = 2.0**-7
"""Twice what rounding to bf16 may do to a row (2^-8): enough for a server that computes in float32 (below 1e-4). One that
computes in bf16 drifts further from float32 with every layer, by a few per cent in a deep model: give it a tolerance to
match, such as 0.1."""
MARGIN: Final = 5.0
"""The states on either side of a layer must miss, in the median token, by so many times more than the layer itself."""
_NORMS: Final = ("norm", "final_layernorm", "ln_f", "final_layer_norm")
POST_NORM: Final = -1


@dataclass(frozen=True, slots=True)
class StateError:
    """How far one stored state of one sample is from the recomputed one; relative errors.

    Attributes:
        name: the state, such as `h_2`.
        worst: of the worst stored token; `worst_token` is its position.
        median: of the median token.
        neighbour: name of the nearer one of the states before and after it.
        neighbour_median: of the median token, had that one been stored in its place.
        ok: within the tolerance, and nearer than the neighbours by the margin.
    """

    name: str
    worst: float
    worst_token: int
    median: float
    neighbour: str
    neighbour_median: float
    ok: bool


@dataclass(frozen=True, slots=True)
class HfSample:
    """One recomputed sample."""

    index: int
    sample_id: str
    tokens: int
    states: list[StateError]


@dataclass(frozen=True, slots=True)
class HfReport:
    """What recomputing found. `samples` are in order of their index."""

    store: str
    model: str
    tolerance: float
    margin: float
    samples: list[HfSample] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every state of every recomputed sample is right, and there was at least one."""
        return bool(self.samples) and all(state.ok for sample in self.samples for state in sample.states)

    @property
    def worst(self) -> float:
        """The largest relative error of all; 0 without samples."""
        return max((state.worst for sample in self.samples for state in sample.states), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"ok": self.ok, "worst": self.worst, **asdict(self)}


def require_model(path: str | PathLike[str]) -> None:
    """Raises RunError `model_unreadable` where `path` is no model folder; transformers would take it for a hub name."""
    folder = Path(path)
    wanted = "expected a local model folder with config.json"
    if not folder.exists():
        raise RunError("model_unreadable", f"{path} does not exist; {wanted}")
    if not (folder / "config.json").is_file():
        found = "has no config.json" if folder.is_dir() else "is not a folder"
        raise RunError("model_unreadable", f"{path} {found}; {wanted}")


class HfModel:
    """A model in float32 whose residual stream is read with hooks.

    Args:
        path: a Hugging Face model folder; nothing is downloaded.

    Raises:
        RunError: `dependency_missing` without transformers, `model_unreadable` where it cannot be loaded or has no stack of
            decoder layers with a norm behind it.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        require_model(path)
        try:
            import torch
            import transformers
        except ModuleNotFoundError as error:
            raise RunError("dependency_missing", f"recomputing needs {error.name}; install hsx[hf]") from error
        try:
            model = transformers.AutoModel.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise RunError("model_unreadable", f"model {path} cannot be loaded: {error}") from error
        self._model: torch.nn.Module = model.eval()
        norm = next((found for name in _NORMS if (found := getattr(model, name, None)) is not None), None)
        layers = getattr(model, "layers", None)
        if norm is None or layers is None:
            raise RunError("model_unreadable", f"model {path} is a {type(model).__name__}; expected decoder layers and a norm")
        self._layers: list[torch.nn.Module] = list(layers)
        self._norm: torch.nn.Module = norm
        self.hidden_size: int = model.config.hidden_size
        """H."""

    @property
    def layers(self) -> int:
        """N, the number of decoder layers."""
        return len(self._layers)

    def states(self, input_ids: Tensor, wanted: set[int]) -> dict[int, Tensor]:
        """The residual stream of one prompt.

        Args:
            input_ids: int64 [tokens].
            wanted: the k of each h_k, 0 to N; `POST_NORM` for the output of the final norm.

        Returns:
            float32 [tokens, H] by k.
        """
        import torch

        found: dict[int, Tensor] = {}

        def keep(k: int, tensor: Tensor) -> None:
            found[k] = tensor.detach()[0].float().clone()  # a layer may go on to change its input in place

        hooks = [
            module.register_forward_pre_hook(
                lambda _module, args, kwargs, k=k: keep(k, args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
            for k, module in enumerate([*self._layers, self._norm])
            if k in wanted
        ]
        if POST_NORM in wanted:
            hooks.append(self._norm.register_forward_hook(lambda _module, _args, output: keep(POST_NORM, output)))
        try:
            with torch.inference_mode():
                self._model(input_ids=input_ids[None], use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def normed(self, state: Tensor) -> Tensor:
        """The final norm applied to states [tokens, H]."""
        import torch

        with torch.inference_mode():
            normed: Tensor = self._norm(state[None])[0]
            return normed


def against_hf(
    store_path: str | PathLike[str],
    model_path: str | PathLike[str] | Path,
    *,
    samples: int = 4,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    margin: float = MARGIN,
    progress: Callable[[int, int], None] | None = None,
) -> HfReport:
    """Recomputes some committed samples and compares every token of every state.

    A state is right when its worst token is within `tolerance` and the states before and after it would miss by `margin` times
    more in the median token: that tells an off-by-one in the layers, which a cosine would not.

    Where the store keeps fewer tokens, those are compared. In an fp8 store the tolerance is wider by the most that conversion
    may cause (`hsx.stores.fp8.row_error`), and for the medians the error of converting the recomputed rows is taken off, as
    what it is: independent of the error that is looked for, so that their squares add up.

    Args:
        store_path: the store.
        model_path: Hugging Face folder of the model that was served.
        samples: how many samples, chosen by `seed`; all where there are fewer.
        seed: another seed chooses others.
        tolerance: largest relative error of a token, see `TOLERANCE`.
        margin: see `MARGIN`.
        progress: called with (samples done, samples to do).

    Raises:
        RunError: `store_invalid` (no store, or a damaged shard), `dependency_missing`, `model_unreadable`. Wrong states are
            reported, not raised.
    """
    store = Store(store_path)
    model = HfModel(model_path)
    _check_fits(store, model, str(model_path))
    chosen = choose(store.committed.tolist(), samples, seed, store.captured_as)
    report = HfReport(str(store.path), str(model_path), tolerance, margin)
    for done, index in enumerate(chosen, start=1):
        report.samples.append(_compare(store.sample(index), store.info, model, tolerance, margin))
        if progress is not None:
            progress(done, len(chosen))
    return report


def choose(committed: list[int], samples: int, seed: int, origin: Callable[[int], int] = lambda index: index) -> list[int]:
    """Which of the committed samples are recomputed, sorted; of those that share a prefill one: the others prove no more."""
    chosen: dict[int, int] = {}
    for index in random.Random(seed).sample(committed, len(committed)):
        if len(chosen) == samples:
            break
        chosen.setdefault(origin(index), index)
    return sorted(chosen.values())


def _check_fits(store: Store, model: HfModel, path: str) -> None:
    deepest = max(store.info.spec.layers, default=0)
    if model.hidden_size != store.hidden_size or deepest >= model.layers:
        raise RunError(
            "model_unreadable",
            f"model {path} has width {model.hidden_size} and {model.layers} layers; "
            f"the store has width {store.hidden_size} and h_{deepest}",
        )


def _compare(sample: StoredSample, store: StoreInfo, model: HfModel, tolerance: float, margin: float) -> HfSample:
    """Judges all states of one sample."""
    spec, last = store.spec, model.layers
    wanted = {k + step for k in spec.layers for step in (-1, 0, 1)} | {last - 1, last, POST_NORM}
    positions = sample.positions
    truth = {k: state[positions] for k, state in model.states(sample.input_ids, wanted).items()}
    stored = sample.hidden_states.float()

    def judge(name: str, stored: Tensor, truth: Tensor, beside: Mapping[str, Tensor]) -> StateError:
        found = _judge(name, stored, truth, beside, tolerance, margin, fp8=store.layout.dtype != "bf16")
        return replace(found, worst_token=int(positions[found.worst_token]))

    errors = [
        judge(name, stored[:, at], truth[k], {f"h_{n}": truth[n] for n in (k - 1, k + 1)})
        for at, (name, k) in enumerate(zip(spec.names, spec.layers, strict=False))
    ]
    if spec.final == "post_norm":
        beside = {f"norm(h_{last - 1})": model.normed(truth[last - 1])}
        errors.append(judge("post_norm", stored[:, -1], truth[POST_NORM], beside))
    else:
        errors.append(judge("pre_norm", stored[:, -1], truth[last], {f"h_{last - 1}": truth[last - 1]}))
    return HfSample(sample.index, sample.id, sample.tokens, errors)


def _judge(
    name: str, stored: Tensor, truth: Tensor, beside: Mapping[str, Tensor], tolerance: float, margin: float, *, fp8: bool
) -> StateError:
    own = _relative(stored, truth)
    medians = {neighbour: _median(stored, state, fp8=fp8) for neighbour, state in beside.items()}
    neighbour = min(medians, key=lambda key: medians[key])
    worst, median = float(own.max()), _median(stored, truth, fp8=fp8)
    if fp8:
        tolerance += row_error(stored.shape[-1])
    return StateError(
        name=name,
        worst=worst,
        worst_token=int(own.argmax()),
        median=median,
        neighbour=neighbour,
        neighbour_median=medians[neighbour],
        ok=worst <= tolerance and medians[neighbour] > margin * median,
    )


def _median(stored: Tensor, truth: Tensor, *, fp8: bool) -> float:
    """The relative error of the median token, without what converting `truth` to fp8 causes by itself."""
    error = _relative(stored, truth)
    if fp8:
        error = (error.square() - _relative(converted(truth), truth).square()).clamp(min=0).sqrt()
    return float(error.median())


def _relative(stored: Tensor, truth: Tensor) -> Tensor:
    """|stored - truth| / |truth| of each row, [tokens]; a NaN counts as infinitely far."""
    error: Tensor = (stored.double() - truth.double()).norm(dim=-1) / truth.double().norm(dim=-1)
    return error.nan_to_num(nan=float("inf"))
