"""What SGLang lacks to run on a CPU; for hsx's tests and demo, never for a real server.

Three things: the published torchvision, built for CUDA, must import beside a CPU torch; multi-head latent attention needs a
dispatch rule that SGLang has only for GPU backends (without it the numbers are silently wrong); and DP attention, which
pads each rank's batch, asks the attention backend for a length that torch_native does not tell (without it the server dies).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MLA_VARIABLE = "HSX_TEST_MLA_ON_CPU"
"""With this set to 1, the torch_native backend takes part in the choice between the forms of latent attention."""

_kept: list[object] = []


class _BeforeTorchvision:
    """An import finder that finds nothing: it declares two operators when torchvision is about to be imported.

    torchvision registers shape functions for `nms` and `qnms` when it is imported, and fails where its own library, which a
    CPU torch cannot load, has not defined them.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # torch gives it no types
            for operator in ("nms", "qnms"):
                library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]  # as above
            _kept.append(library)
        return None


def declare_torchvision_ops() -> None:
    """Called by the .pth file at every start of the interpreter; cheap until torchvision is imported."""
    sys.meta_path.insert(0, _BeforeTorchvision())


def register() -> None:
    """SGLang's plugin entry point: with `HSX_TEST_MLA_ON_CPU=1`, adds the missing dispatch rule, and the missing length."""
    if os.environ.get(MLA_VARIABLE) != "1":
        return
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register(
        "torch_native", lambda attention, batch: handler._dispatch_mla_subtype(attention, batch)
    )
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"):
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _backend: 1
