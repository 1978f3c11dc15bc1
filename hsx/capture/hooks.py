"""The hooks: SGLang's objects in, `Session`'s calls out.

Two places are watched. Around `ModelRunner.forward` the live batch is read before anything pads it: which requests, which
of their tokens. Before `LogitsProcessor.forward`, inside that call, the tensors are there in full: SGLang cuts them down to
each prompt's last token only after this point. The logits processor alone would not do, because under prefill graphs it is
given a static batch without request ids.

Both run in the scheduler's own thread, one forward at a time, also under the overlap scheduler; so the batch under way is
one attribute. A forward's dumps are published before `forward` returns, hence before the request is answered.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from hsx.capture import unrounded
from hsx.capture.counter import Counter
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.model import CaptureRefusedError, find_norm, norm_input, set_layers
from hsx.capture.report import write_refusal, write_report
from hsx.capture.session import Batch, Session
from hsx.core.epoch import NORM_NAME, CaptureReport
from hsx.core.spec import CaptureSpec, final_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hsx.core.epoch import EpochRecord

log = logging.getLogger(__name__)

PREFILL_MODES: Final = frozenset({"EXTEND", "MIXED"})
"""`ForwardMode` names whose batches are taken; MIXED has decode requests beside prefills, each as an extension by one."""


class _Mode(Protocol):
    name: str


class _ForwardBatch(Protocol):
    """What is read of `sglang.srt.model_executor.forward_batch_info.ForwardBatch`."""

    forward_mode: _Mode
    rids: Sequence[str] | None
    extend_prefix_lens_cpu: Sequence[int]
    extend_seq_lens_cpu: Sequence[int]
    input_ids: torch.Tensor | None


class _ServerArgs(Protocol):
    pp_size: int
    dp_size: int


class _ModelConfig(Protocol):
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int


class _ModelRunner(Protocol):
    """What is read of `sglang.srt.model_executor.model_runner.ModelRunner`."""

    is_draft_worker: bool
    server_args: _ServerArgs
    model_config: _ModelConfig
    model: torch.nn.Module


class Hooks:
    """The state behind the three hooks, one per process.

    Args:
        record: this epoch's record, which carries the capture spec.
        folder: `<dump_dir>/<epoch>`.
    """

    def __init__(self, record: EpochRecord, folder: Path) -> None:
        self._record = record
        self._folder = folder
        self._session: Session | None = None
        self._batch: Batch | None = None
        self._pre_norm: torch.Tensor | None = None
        self._takes_pre_norm = False

    def after_load_model(self, _result: object, runner: _ModelRunner, *_args: object, **_kwargs: object) -> None:
        """AFTER `ModelRunner.load_model`: turns capture on in the model and reports what was read back.

        Where that is impossible the server still starts, without capture and without a report, and `capture.error` says
        why: hsx refuses such a server at once, and does not load the model again and again.
        """
        if runner.is_draft_worker:
            return
        try:
            self._install(runner)
        except Exception as error:  # the boundary towards SGLang: a raise here would only show as a dead server
            reason = str(error) if isinstance(error, CaptureRefusedError) else f"{type(error).__name__}: {error}"
            log.exception("capture.refused")
            try:
                write_refusal(self._folder, reason)
            except OSError:
                log.exception("capture.error_file_failed")

    def around_forward(
        self,
        original: Callable[..., object],
        runner: _ModelRunner,
        forward_batch: _ForwardBatch,
        *args: object,
        **kwargs: object,
    ) -> object:
        """AROUND `ModelRunner.forward`."""
        session = self._session
        if session is None or runner.is_draft_worker:
            return original(runner, forward_batch, *args, **kwargs)
        batch = self._read(session, forward_batch)
        self._batch, self._pre_norm = batch, None
        try:
            output = original(runner, forward_batch, *args, **kwargs)
        finally:
            self._batch, self._pre_norm = None, None
        if batch is not None:
            session.finish(batch)
        session.save()
        return output

    def before_logits(
        self,
        _processor: object,
        _input_ids: object,
        hidden_states: torch.Tensor,
        _lm_head: object,
        _logits_metadata: object,
        aux_hidden_states: torch.Tensor | list[torch.Tensor] | None = None,
        hidden_states_before_norm: torch.Tensor | None = None,
    ) -> None:
        """BEFORE `LogitsProcessor.forward`; changes nothing."""
        del hidden_states_before_norm  # few models give it; the norm's own call is there for all
        if self._session is not None and self._batch is not None:
            final = self._pre_norm if self._takes_pre_norm else hidden_states
            self._session.tensors(self._batch, aux_hidden_states, final)

    def _read(self, session: Session, forward_batch: _ForwardBatch) -> Batch | None:
        mode = forward_batch.forward_mode.name
        if mode not in PREFILL_MODES or not forward_batch.rids:
            return None
        with session.contained([]):
            return session.begin(
                [str(rid) for rid in forward_batch.rids],
                [int(n) for n in forward_batch.extend_prefix_lens_cpu],
                [int(n) for n in forward_batch.extend_seq_lens_cpu],
                forward_batch.input_ids,
            )
        return None

    def _install(self, runner: _ModelRunner) -> None:
        from sglang import __version__ as sglang_version
        from sglang.srt.distributed.parallel_state import get_attn_tensor_model_parallel_rank

        from hsx import __version__

        if self._session is not None:
            raise CaptureRefusedError("a second model was loaded in this process; its states cannot be told from the first's")
        server = runner.server_args
        if server.pp_size > 1:
            raise CaptureRefusedError(
                f"pp_size is {server.pp_size}; only the last stage's layers would be seen: set --pp-size 1"
            )
        if server.dp_size > 1:
            raise CaptureRefusedError(f"dp_size is {server.dp_size}; each rank would count its own sequence: set --dp-size 1")
        record, config = self._record, runner.model_config
        spec = CaptureSpec(record.layers, final_state(record.final))
        body, layers = set_layers(runner.model, spec, int(config.num_hidden_layers))
        norm = find_norm(body)
        if spec.final == "pre_norm":
            if norm is None:
                raise CaptureRefusedError(f"{type(body).__name__} has no final norm named norm; use final = 'post_norm'")
            self._takes_pre_norm = True
            norm.module.register_forward_hook(self._after_norm)
        # Every rank of the tensor-parallel group holds the full states; one writes.
        if get_attn_tensor_model_parallel_rank() != 0:
            return
        # Before the report: whoever sees that finds the state beside it, and a second server reports nothing.
        counter = Counter(self._folder, record.epoch)
        hidden_size = int(config.hidden_size)
        engine = f"sglang {sglang_version}"
        aid = os.environ.get(unrounded.VARIABLE)
        writer = DumpWriter(self._folder, record.epoch, spec, hidden_size, record.model, engine)
        session = Session(
            writer,
            counter,
            len(layers),
            unrounded.Unrounded(Path(aid), spec.states, hidden_size) if aid else None,
        )
        weight = norm.weight if norm else None
        report = CaptureReport(
            epoch=record.epoch,
            layers=layers,
            final=spec.final,
            hidden_size=hidden_size,
            model_layers=int(config.num_hidden_layers),
            vocab_size=int(config.vocab_size),
            norm_eps=norm.eps if norm else 0.0,
            norm_file=NORM_NAME if weight is not None else "",
            engine_version=sglang_version,
            plugin_version=__version__,
        )
        write_report(self._folder, report, weight)
        self._session = session
        log.info("capture.installed epoch=%s layers=%s final=%s folder=%s", record.epoch, layers, spec.final, self._folder)

    def _after_norm(self, _module: torch.nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if self._session is not None and self._batch is not None:
            with self._session.contained(self._batch.markers):
                self._pre_norm = norm_input(inputs, output)
