"""Which stored states go where in a trainer's file, decided before anything is written, and said in words."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsx.core.spec import CaptureSpec, FinalState
    from hsx.export.protocol import Format


@dataclass(frozen=True, slots=True)
class Mapping:
    """From the store's states to a format's slots.

    Attributes:
        stored: names of the states that are read, in the order of the slots; the last one is the store's final state.
        names: names of the states that are written; differ from `stored` in the last one where it is computed.
        shift: what the trainer calls h_k: k minus this.
        slots: where each of them lies in a file.
    """

    stored: tuple[str, ...]
    names: tuple[str, ...]
    shift: int
    slots: tuple[str, ...]

    @property
    def computed(self) -> bool:
        """Whether post_norm is computed from pre_norm."""
        return self.stored != self.names

    @property
    def trainer_layers(self) -> list[int]:
        """The layers, in the trainer's own count."""
        return [int(name.removeprefix("h_")) - self.shift for name in self.names[:-1]]

    def lines(self) -> list[str]:
        """One line for each slot, for people."""
        found = [
            f"{slot} = {name} ({self._in_words(layer)} in the trainer's count)"
            for slot, name, layer in zip(self.slots, self.names[:-1], self.trainer_layers, strict=False)
        ]
        how = f" computed from {self.stored[-1]} with the recorded final norm" if self.computed else " as stored"
        return [*found, f"{self.slots[-1]} = {self.names[-1]},{how}"]

    def _in_words(self, layer: int) -> str:
        if layer == -self.shift:
            return f"the embeddings: {layer}"
        return f"the output of layer {layer}" if self.shift else f"layer id {layer}"

    def document(self) -> dict[str, Any]:
        """The same as JSON values, for the manifest."""
        return {
            "slots": [
                {"slot": slot, "state": name, "stored": stored}
                for slot, name, stored in zip(self.slots, self.names, self.stored, strict=True)
            ],
            "states": list(self.names),
            "layers": [int(name.removeprefix("h_")) for name in self.names[:-1]],
            "trainer_layers": self.trainer_layers,
            "final": self.names[-1],
            "final_computed": self.computed,
        }


def map_states(
    form: Format,
    spec: CaptureSpec,
    chosen: Sequence[int] | None,
    *,
    has_norm: bool,
    final: FinalState | None = None,
) -> Mapping:
    """Decides it.

    Args:
        form: the format.
        spec: what the store has.
        chosen: the k of the layers to take, in this order; None: all that the store has.
        has_norm: the store has recorded the model's final norm.
        final: the final state, where the format takes either; None: as the format wants it, or as it is stored.

    Raises:
        RunError: `export_refused` where the store has not what the format wants.
    """
    layers = _chosen_layers(form, spec, chosen)
    if form.final is not None and final not in (None, form.final):
        raise RunError("export_refused", f"{form.name} takes {form.final}, and --final is {final}; expected no --final")
    final = final or form.final or spec.final
    if final == "pre_norm" and spec.final == "post_norm":
        raise RunError(
            "export_refused",
            f"{form.name} is to have pre_norm (h_N before the final norm) and the store has post_norm, which cannot be undone: "
            "the norm loses each token's length; expected a store that was captured with capture.final = 'pre_norm'",
        )
    if final != spec.final and not has_norm:
        raise RunError(
            "export_refused",
            f"{form.name} is to have post_norm and the store has pre_norm without the model's final norm; expected a store "
            "whose server has reported its norm, which an imported one has not",
        )
    at_layer, at_final = form.slots
    slots = (*(at_layer.format(slot=slot, next=slot + 1) for slot in range(len(layers))), at_final)
    names = tuple(f"h_{k}" for k in layers)
    return Mapping((*names, spec.final), (*names, final), form.layer_shift, slots)


def _chosen_layers(form: Format, spec: CaptureSpec, chosen: Sequence[int] | None) -> tuple[int, ...]:
    layers = spec.layers if chosen is None and form.layers != 0 else tuple(chosen or ())
    have, said = ", ".join(map(str, spec.layers)), ",".join(map(str, layers))
    strange = [k for k in layers if k not in spec.layers]
    if strange:
        raise RunError("export_refused", f"the store has no h_{strange[0]}; expected --layers out of {have}")
    if len(set(layers)) != len(layers):
        raise RunError("export_refused", f"--layers is {said}; expected each layer once")
    if not form.any_order and any(after < before for before, after in pairwise(layers)):
        raise RunError(
            "export_refused",
            f"--layers is {said}; expected {','.join(map(str, sorted(layers)))}: servers hand a draft its layers in rising "
            f"order, whatever order its configuration names them in, so a draft of {form.name} must be trained on that order",
        )
    if form.layers is not None and len(layers) != form.layers:
        wanted = "no layers besides the final state" if form.layers == 0 else f"{form.layers} layers"
        expected = "no --layers" if form.layers == 0 else f"--layers with {form.layers} of {have}"
        raise RunError("export_refused", f"{form.name} takes {wanted}, and {len(layers)} are chosen; expected {expected}")
    if not layers and form.layers is None:
        raise RunError("export_refused", f"{form.name} takes at least one layer besides the final state; the store has none")
    return layers
