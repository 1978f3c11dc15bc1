"""The reference engine: a small server that looks like SGLang with hsx's capture in it, as a process of its own.

    python -m hsx.testing.reference_engine --model-path MODEL --port PORT [...]

It computes a real transformer (`reference_model`), prefills in shared chunks (`reference_scheduler`), publishes dumps with the
capture side's own writer (`reference_dumps`), speaks SGLang's HTTP (`reference_http`) and breaks on command (`faults`). What to
capture stands in the epoch record that `hsx serve` wrote and names in HSX_EPOCH_RECORD; or, without one, in `--dump-dir`,
`--epoch`, `--layers` and `--final`, and the engine writes its own record. With neither nothing is captured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from aiohttp import web

import hsx
from hsx.capture.counter import Counter
from hsx.capture.model import CaptureRefusedError
from hsx.capture.report import write_refusal, write_report
from hsx.core.epoch import (
    NORM_NAME,
    RECORD_NAME,
    RECORD_VARIABLE,
    CaptureReport,
    EpochRecord,
    rank_name,
    record_from_json,
    to_json,
)
from hsx.core.spec import CaptureSpec, final_state
from hsx.engines.process import boot_id, start_ticks
from hsx.errors import HsxError, RunError
from hsx.testing.faults import Faults
from hsx.testing.reference_dumps import Publisher
from hsx.testing.reference_http import Face, Settings
from hsx.testing.reference_model import ReferenceModel
from hsx.testing.reference_scheduler import Scheduler, recompute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_IGNORED: Final = ("--dtype", "--device", "--attention-backend", "--grammar-backend", "--max-total-tokens")


def parser() -> argparse.ArgumentParser:
    """The command line. Arguments of SGLang's that make no difference here are taken and ignored."""
    args = argparse.ArgumentParser(prog="python -m hsx.testing.reference_engine", description=__doc__, allow_abbrev=False)
    args.add_argument("--model-path", type=Path, required=True)
    args.add_argument("--revision", default="")
    args.add_argument("--host", default="127.0.0.1")
    args.add_argument("--port", type=int, default=30000)
    args.add_argument("--chunked-prefill-size", type=int, default=128)
    args.add_argument("--max-queued-requests", type=int)
    args.add_argument("--dp-size", type=int, default=1, help="data-parallel ranks, each with a queue and dumps of its own")
    args.add_argument("--disable-radix-cache", action="store_true", help="accepted and ignored: off unless --radix-cache")
    args.add_argument("--radix-cache", action="store_true", help="pretend to keep a prefix cache")
    args.add_argument("--skip-server-warmup", action="store_true", help="accepted and ignored")
    for name in _IGNORED:
        args.add_argument(name, help="accepted and ignored")
    args.add_argument("--dump-dir", type=Path, help="write an epoch record of one's own under this folder")
    args.add_argument("--epoch", default="", help="uuid of that record")
    args.add_argument("--layers", default="", help="comma-separated k of each h_k")
    args.add_argument("--final", default="post_norm", choices=("post_norm", "pre_norm"))
    args.add_argument("--allow-faults", action="store_true", help="serve /_fault, see hsx.testing.faults")
    args.add_argument(
        "--fault", action="append", default=[], help="JSON object, as for /_fault: armed at the start; repeatable"
    )
    args.add_argument("--die-at-boot", type=Path, help="file with a number of starts still to fail; each takes one off")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server until SIGTERM or SIGINT. Returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        asyncio.run(_serve(options))
    except (HsxError, OSError) as error:
        sys.stderr.write(f"reference engine: {error}\n")
        return 1
    return 0


async def _serve(options: argparse.Namespace) -> None:
    # One thread for torch: the models are tiny, and the tests run beside it.
    torch.set_num_threads(1)
    record, folder = _record(options)
    _die_at_boot(options.die_at_boot)
    model, faults = ReferenceModel(options.model_path), _armed(options.fault)
    spec = CaptureSpec((), "post_norm")
    publishers: list[Publisher | None] = [None] * options.dp_size
    if record is not None and folder is not None:
        reports = [_report(record, model, rank, options.dp_size) for rank in range(options.dp_size)]
        spec = reports[0].spec
        publishers = [_publisher(folder, record, report, model, faults) for report in reports]
    schedulers = [Scheduler(model, spec, options.chunked_prefill_size, faults, publisher) for publisher in publishers]
    settings = Settings(
        model_path=str(options.model_path),
        version=hsx.__version__,
        vocab_size=model.config.vocab_size,
        context_length=model.config.max_position_embeddings,
        chunk=options.chunked_prefill_size,
        max_queued=options.max_queued_requests,
        radix_cache=options.radix_cache,
        allow_faults=options.allow_faults,
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    # handler_cancellation: a client that goes away cancels its handler, which cuts the prompt.
    runner = web.AppRunner(
        Face(settings, schedulers, faults).application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    sys.stderr.write(f"reference engine: listening on {options.host}:{options.port}\n")
    await stopped.wait()
    await runner.cleanup()


def _armed(texts: Sequence[str]) -> Faults:
    faults = Faults()
    for text in texts:
        try:
            faults.arm_json(text)
        except ValueError as error:
            raise RunError("usage", str(error)) from error
    return faults


def _record(options: argparse.Namespace) -> tuple[EpochRecord | None, Path | None]:
    """The epoch record in force, and its folder."""
    named = os.environ.get(RECORD_VARIABLE)
    if named:
        return record_from_json(Path(named).read_text()), Path(named).parent
    if options.dump_dir is None:
        return None, None
    if not options.epoch or not options.layers:
        raise RunError("usage", "--dump-dir needs --epoch and --layers")
    record = EpochRecord(
        epoch=options.epoch,
        boot_id=boot_id(),
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        invocation_id=os.environ.get("INVOCATION_ID", ""),
        command=tuple(sys.argv),
        model=str(options.model_path),
        revision=options.revision,
        layers=tuple(int(k) for k in options.layers.split(",")),
        final=options.final,
        engine="reference",
        engine_version=hsx.__version__,
        plugin_version=hsx.__version__,
        host=options.host,
        port=options.port,
    )
    folder = options.dump_dir / options.epoch
    folder.mkdir(parents=True)
    _write(folder / RECORD_NAME, to_json(record).encode())
    return record, folder


def _report(record: EpochRecord, model: ReferenceModel, rank: int, ranks: int) -> CaptureReport:
    config = model.config
    final = final_state(record.final)
    problems = CaptureSpec(record.layers, final).problems(config.num_hidden_layers)
    if problems:
        raise RunError("config_invalid", "; ".join(problems))
    return CaptureReport(
        epoch=record.epoch,
        layers=record.layers,
        final=final,
        hidden_size=config.hidden_size,
        model_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        norm_file=rank_name(NORM_NAME, rank),
        engine_version=hsx.__version__,
        plugin_version=hsx.__version__,
        tp_size=1,
        dp_size=ranks,
        rank=rank,
        architecture="ReferenceModel",
        method="model",
        head_multiplier=1.0,
        dtype="float32",
    )


def _publisher(
    folder: Path, record: EpochRecord, report: CaptureReport, model: ReferenceModel, faults: Faults
) -> Publisher | None:
    """None, with the reason in `capture.error`, where another process captures into this epoch: as the plugin does."""

    def again(ids: NDArray[np.int32]) -> NDArray[np.uint16]:
        return recompute(model, report.spec, ids)

    try:
        counter = Counter(folder, record.epoch, report.rank)
    except CaptureRefusedError as error:
        sys.stderr.write(f"reference engine: {error}\n")
        write_refusal(folder, str(error), report.rank)
        return None
    publisher = Publisher(folder, report, record.model, f"reference {hsx.__version__}", counter, faults, again)
    write_report(folder, report, model.norm.numpy().astype(np.float32))
    return publisher


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.rename(path)


def _die_at_boot(counter: Path | None) -> None:
    left = int(counter.read_text()) if counter is not None and counter.exists() else 0
    if counter is not None and left > 0:
        counter.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
