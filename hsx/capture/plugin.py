"""The entry point `sglang.srt.plugins: hsx`. SGLang calls `register` in each of its processes, before it loads a model.

SGLang only logs a plugin that raises and serves on without it, so nothing here may be taken for proof that capture works:
the proof is `capture.json` in the epoch's folder and a dump that comes back.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

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
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hsx.capture.hooks import Hooks

    record = record_from_json(Path(path).read_text(encoding="utf-8"))
    hooks = Hooks(record, Path(path).parent)
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.load_model", hooks.after_load_model, HookType.AFTER)
    HookRegistry.register(f"{runner}.forward", hooks.around_forward, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor.forward", hooks.before_logits, HookType.BEFORE)
