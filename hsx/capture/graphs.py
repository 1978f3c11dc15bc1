"""Whether this server replays prefills from graphs: asked of SGLang, in the words in which it asks itself.

Under a graph the norms do not run as modules, so that what is taken at a module's own call (h_0, `pre_norm`, all layers of a
model that cannot hand them out) is not seen. What the model hands out is: the graphs are made after the model is loaded
(`init_prefill_cuda_graph`, called behind `load_model` in `model_executor/model_runner.py`), hence of a forward that hands out
the layers chosen then; and the head runs eagerly behind a replay, on its outputs (`_execute_body_capture` in
`model_executor/runner/prefill_cuda_graph_runner.py`).

Which prefills are replayed is decided for each batch (`can_replay_locally`, there): by its size and by what its requests want.
A server with graphs would therefore fail some dumps and not others; so it is refused as a whole, when it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from hsx.capture.model import CaptureRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

NONE: Final = "disabled"
"""The backend of a server whose prefills all run eagerly."""
_BACKENDS: Final = (NONE, "breakable", "full", "tc_piecewise")


class _ModelRunner(Protocol):
    @property
    def server_args(self) -> object: ...


def prefill_backend(runner: _ModelRunner) -> str:
    """How prefills may be replayed, in SGLang's words: `disabled`, `breakable`, `full` or `tc_piecewise`.

    "" where it does not say. Since 0.5.14 each phase has a backend, and `capture_prefill_graph` makes no graph where
    `check_cuda_graph_backend` says that it is `disabled`. Before, piecewise graphs were made unless
    `disable_piecewise_cuda_graph` was set (`ModelRunner.init_piecewise_cuda_graphs`).
    """
    try:
        from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend
    except ImportError:
        disabled = getattr(runner.server_args, "disable_piecewise_cuda_graph", None)
        return "" if disabled is None else NONE if disabled else "tc_piecewise"
    return next((name for name in _BACKENDS if check_cuda_graph_backend("prefill", name)), "")


def refuse_graphs(runner: _ModelRunner, states: Sequence[str]) -> None:
    """Refuses a server in which `states`, which are taken at module calls, may not be seen.

    Raises CaptureRefusedError; not where `states` is empty: then nothing is asked.
    """
    if not states:
        return
    backend = prefill_backend(runner)
    if backend != NONE:
        said = f"are replayed from graphs (backend {backend!r})" if backend else "may be replayed from graphs (it does not say)"
        raise CaptureRefusedError(
            f"{', '.join(states)} can only be taken where the model's norms run as modules, and this server's prefills {said}: "
            "start it with --disable-prefill-cuda-graph (--disable-piecewise-cuda-graph before SGLang 0.5.14)"
        )
