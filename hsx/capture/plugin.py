"""The entry point `sglang.srt.plugins: hsx`. SGLang calls `register` in each of its processes, before it loads a model.

SGLang only logs a plugin that raises, or a hook whose target it does not find, and serves on without it. What is seen of that
here is written to `capture.error`, so that hsx refuses the server by the hook's name. Nothing of this is proof that capture
works: the proof is `capture.json` in the epoch's folder and a dump that comes back.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hsx.capture.report import write_refusal
from hsx.capture.targets import LOGITS, RUNNER, missing_at_run_time
from hsx.core.epoch import RECORD_VARIABLE, record_from_json

log = logging.getLogger(__name__)


def register() -> None:
    """Registers the capture hooks, or says in the log that there is no epoch to capture for.

    Raises EngineError `epoch_unknown`, or OSError, where the record cannot be read.
    """
    path = os.environ.get(RECORD_VARIABLE)
    if not path:
        log.info("capture.not_installed reason=%s is not set (the server was not started by hsx serve)", RECORD_VARIABLE)
        return
    record = record_from_json(Path(path).read_text(encoding="utf-8"))
    folder = Path(path).parent
    missing = missing_at_run_time()
    if missing:
        reason = f"sglang {record.engine_version} is not as hsx knows it: " + "; ".join(missing)
        log.error("capture.refused reason=%s", reason)
        write_refusal(folder, reason)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hsx.capture.hooks import Hooks

    hooks = Hooks(record, folder)
    HookRegistry.register(f"{RUNNER}.load_model", hooks.after_load_model, HookType.AFTER)
    HookRegistry.register(f"{RUNNER}.forward", hooks.around_forward, HookType.AROUND)
    HookRegistry.register(f"{LOGITS}.forward", hooks.before_logits, HookType.BEFORE)
