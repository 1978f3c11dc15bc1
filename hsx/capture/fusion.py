"""Whether this server adds up its ranks' sums and normalises them in one kernel: layers may then be handed out before that.

Where the kernel takes a batch, a decoder layer's output leaves the layer as this rank's part of the sum, marked
(`_sglang_needs_allreduce_fusion`), and the next layer's input norm completes it (`LayerCommunicator.prepare_attn` in
`layers/communicator.py`). Some models hand out what they have before that, `hidden_states + residual`: one rank's part, which
looks like a state (`models/glm4_moe.py` and `models/gpt_oss.py` in 0.5.18). Others complete it first, and so do all that use
the layers' boundaries as made anew (`layers/layer_boundary/stage.py`, 0.5.23). Which is which follows from version and model,
and whether a batch is taken from its size (2048 tokens): so a proof made in one forward says nothing of the next. Besides, the
norm does not run as a module then, so there is no proof. On Hopper and Blackwell SGLang turns it on by itself for many models
(`_flashinfer_allreduce_fusion_auto_enable` in `arg_groups/overrides.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from hsx.capture.model import CaptureRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SETTINGS: Final = {
    "flashinfer_allreduce_fusion_backend": "start it with --enforce-disable-flashinfer-allreduce-fusion",
    "enable_flashinfer_allreduce_fusion": "start it with --enforce-disable-flashinfer-allreduce-fusion",
    "enable_aiter_allreduce_fusion": "start it without --enable-aiter-allreduce-fusion",
}
"""The server's settings (None or False: off), and what turns each off."""


class _ModelRunner(Protocol):
    @property
    def server_args(self) -> object: ...


def _settled(runner: _ModelRunner) -> object:
    """What has the settings as the server has settled them.

    From 0.5.19 on `server_args` stays as it was given, and what SGLang turns on by itself is in its runtime context alone
    (`declare_resolution` in `arg_groups/overrides.py`), which is what the layers ask since 0.5.17.
    """
    try:
        from sglang.srt.runtime_context import get_exec
    except ImportError:
        return runner.server_args
    settled: object = get_exec().comm
    return settled


def refuse_fusion(runner: _ModelRunner, layers: Sequence[int], tp_size: int) -> None:
    """Refuses a server whose ranks may hand out parts of h_k, for k above 0, in the place of the sum.

    Args:
        runner: the model's runner.
        layers: k of every h_k that is captured; h_0 is complete when the first layer gets it.
        tp_size: ranks that hold a part of each layer.

    Raises:
        CaptureRefusedError: all-reduce and norm are one kernel.
    """
    if tp_size == 1 or not any(layers):
        return
    settled = _settled(runner)
    for setting, cure in _SETTINGS.items():
        value = getattr(settled, setting, None)
        if value:
            raise CaptureRefusedError(
                f"{setting} is {value!r} with {tp_size} tensor-parallel ranks: all-reduce and norm may be one kernel, and "
                f"layers may be handed out before the ranks' parts are added up: {cure}"
            )
