"""The hooks: SGLang's objects in, `Session`'s calls out.

Two places are watched. Around `ModelRunner.forward` the live batch is read before anything pads it: which requests, which
of their tokens. Before `LogitsProcessor.forward`, inside that call, the tensors are there in full: SGLang cuts them down to
each prompt's last token only after this point. The logits processor alone would not do, because under prefill graphs it is
given a static batch without request ids.

Both run in the scheduler's own thread, one forward at a time, also under the overlap scheduler; so the batch under way is
one attribute. A forward's dumps are published by the staging's writer thread, soon after `forward` returns: before or after the
request is answered.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch

from hsx.capture import unrounded
from hsx.capture.calls import Dumps, DumpsHere
from hsx.capture.counter import Counter
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.fusion import refuse_fusion
from hsx.capture.graphs import refuse_graphs
from hsx.capture.model import CaptureRefusedError, choose_layers, divides_final, find_norm, head_multiplier
from hsx.capture.pool import Pool
from hsx.capture.ranks import find_place
from hsx.capture.report import write_refusal, write_report
from hsx.capture.session import Batch, Session
from hsx.capture.staging import Staging
from hsx.capture.taps import Taps
from hsx.capture.writer_process import DumpsElsewhere
from hsx.core.epoch import NORM_NAME, CaptureReport, rank_name
from hsx.core.spec import CaptureSpec, final_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hsx.core.epoch import EpochRecord

log = logging.getLogger(__name__)

PREFILL_MODES: Final = frozenset({"EXTEND", "MIXED"})
"""`ForwardMode` names whose batches are taken; MIXED has decode requests beside prefills, each as an extension by one."""
CONVERTIBLE: Final = ("float16", "float32")
"""Dtypes of a residual stream that may be rounded to bf16."""


class _Mode(Protocol):
    name: str


class _ForwardBatch(Protocol):
    """What is read of `sglang.srt.model_executor.forward_batch_info.ForwardBatch`."""

    forward_mode: _Mode
    rids: Sequence[str] | None
    extend_prefix_lens_cpu: Sequence[int]
    extend_seq_lens_cpu: Sequence[int]
    input_ids: torch.Tensor | None
    input_embeds: torch.Tensor | None
    mm_inputs: Sequence[object | None] | None


class _ServerArgs(Protocol):
    pp_size: int
    dp_size: int
    nnodes: int
    node_rank: int


class _ModelConfig(Protocol):
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    dtype: object


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
        self._taps: Taps | None = None
        self._condemned = False
        self._spent_ns = 0
        self._rank = 0

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
                write_refusal(self._folder, reason, self._rank)
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
        if forward_batch.forward_mode.name not in PREFILL_MODES or not forward_batch.rids:
            return original(runner, forward_batch, *args, **kwargs)
        began = time.perf_counter_ns()
        batch = self._read(session, forward_batch)
        self._batch = batch
        self._spent_ns = time.perf_counter_ns() - began
        taps = self._taps if batch is not None else None
        try:
            with taps.watch() if taps is not None else contextlib.nullcontext():
                output = original(runner, forward_batch, *args, **kwargs)
        finally:
            self._batch = None
        began = time.perf_counter_ns()
        if batch is not None:
            session.finish(batch)
        session.save(self._spent_ns + time.perf_counter_ns() - began)
        if self._condemned:
            self._session = None
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
        session, batch, taps = self._session, self._batch, self._taps
        if session is None or batch is None or taps is None:
            return
        began = time.perf_counter_ns()
        with session.contained(batch.markers):
            problem = taps.problem(aux_hidden_states, hidden_states, batch.plan.rows) if taps.proving else None
            if problem is not None:
                self._condemned = True
                session.later(partial(write_refusal, self._folder, problem, self._rank))
                raise CaptureRefusedError(problem)
            parts, final = taps.states(aux_hidden_states, hidden_states)
            session.tensors(batch, parts, final)
        self._spent_ns += time.perf_counter_ns() - began

    def _read(self, session: Session, forward_batch: _ForwardBatch) -> Batch | None:
        with session.contained([]):
            self._refuse_other_inputs(session, forward_batch)
            return session.begin(
                [str(rid) for rid in forward_batch.rids or ()],
                [int(n) for n in forward_batch.extend_prefix_lens_cpu],
                [int(n) for n in forward_batch.extend_seq_lens_cpu],
                forward_batch.input_ids,
            )
        return None

    def _refuse_other_inputs(self, session: Session, forward_batch: _ForwardBatch) -> None:
        """States are stored under token ids; of an image, a sound or an embedding the ids say nothing.

        A multi-modal model is captured well as long as its prompts are text, so only requests are refused.
        """
        rids = forward_batch.rids or ()
        for rid, other in zip(rids, forward_batch.mm_inputs or (), strict=False):
            if other is not None:
                session.refuse(str(rid), "the request has multi-modal inputs (images, audio or video); expected text alone")
        if forward_batch.input_embeds is not None:
            for rid in rids:
                session.refuse(str(rid), "the batch has input embeddings in the place of token ids; expected ids")

    def _install(self, runner: _ModelRunner) -> None:
        from sglang import __version__ as sglang_version

        from hsx import __version__

        if self._session is not None:
            raise CaptureRefusedError("a second model was loaded in this process; its states cannot be told from the first's")
        server = runner.server_args
        if server.pp_size > 1:
            raise CaptureRefusedError(
                f"pp_size is {server.pp_size}; only the last stage's layers would be seen: set --pp-size 1"
            )
        place = find_place(runner)
        self._rank = place.dp_rank
        record, config = self._record, runner.model_config
        spec = CaptureSpec(record.layers, final_state(record.final))
        dtype = str(config.dtype).removeprefix("torch.")
        if dtype != "bfloat16" and not (record.convert and dtype in CONVERTIBLE):
            raise CaptureRefusedError(
                f"the server computes in {dtype}; expected bfloat16: set --dtype bfloat16, or capture.convert for {CONVERTIBLE}"
            )
        layers = choose_layers(runner.model, spec, int(config.num_hidden_layers))
        norm = find_norm(layers.body)
        from_norm = divides_final(runner.model) != 1.0
        if norm is None and (from_norm or spec.final == "pre_norm"):
            raise CaptureRefusedError(
                f"{type(layers.body).__name__} has no final norm by a usual name; h_N cannot be taken there"
            )
        taps = Taps(spec, layers, norm, from_norm=from_norm, convert=record.convert)
        if not place.writes:
            return
        refuse_fusion(runner, spec.layers, place.tp_size)
        refuse_graphs(runner, taps.at_modules)
        # Before the report: whoever sees that finds the state beside it, and a second server reports nothing.
        counter = Counter(self._folder, record.epoch, place.dp_rank)
        hidden_size = int(config.hidden_size)
        engine = f"sglang {sglang_version}"
        aid = os.environ.get(unrounded.VARIABLE)
        writer = DumpWriter(self._folder, record.epoch, spec, hidden_size, record.model, engine, place.dp_rank)
        pool = Pool(
            record.staging_bytes,
            spec.states,
            hidden_size,
            torch.float32 if aid else torch.bfloat16,
            pinned=next(runner.model.parameters()).is_cuda,
        )
        dumps = _dumps(writer, pool, counter)
        staging = Staging(dumps, counter, pool, unrounded.Unrounded(Path(aid), spec.states, hidden_size) if aid else None)
        session = Session(staging, len(spec.layers), "fail" if record.when_full == "fail" else "block")
        # The scheduler is a spawned process (`mp.set_start_method("spawn")`, `entrypoints/engine.py`), which leaves through
        # the interpreter's exit when it is told to shut down (`ShutdownReq`, `managers/scheduler.py`). A server that is killed
        # has no such end: then the state file is what is left of these figures.
        atexit.register(session.close)
        weight = norm.weight if norm else None
        report = CaptureReport(
            epoch=record.epoch,
            layers=tuple(sorted({*layers.handed_out, *layers.taken})),
            final=spec.final,
            hidden_size=hidden_size,
            model_layers=int(config.num_hidden_layers),
            vocab_size=int(config.vocab_size),
            norm_eps=norm.eps if norm else 0.0,
            norm_file=rank_name(NORM_NAME, place.dp_rank) if weight is not None else "",
            engine_version=sglang_version,
            plugin_version=__version__,
            tp_size=place.tp_size,
            dp_size=place.dp_size,
            rank=place.dp_rank,
            architecture=type(runner.model).__name__,
            method=layers.method,
            head_multiplier=head_multiplier(runner.model),
            dtype=dtype,
        )
        write_report(self._folder, report, weight)
        self._taps = taps
        self._session = session
        log.info(
            "capture.installed epoch=%s layers=%s method=%s final=%s folder=%s",
            *(record.epoch, report.layers, layers.method, spec.final, self._folder),
        )


def _dumps(writer: DumpWriter, pool: Pool, counter: Counter) -> Dumps:
    """Who writes: another process, or the writer thread itself where there can be none."""
    if pool.memory is not None:
        try:
            return DumpsElsewhere(writer, pool.memory, counter.lock_fd)
        except OSError as error:
            log.warning("capture.no_writer_process reason=%s", error)
    return DumpsHere(writer)
