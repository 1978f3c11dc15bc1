"""One life of one server process, as it is recorded in the dump directory.

`<dump_dir>/<epoch>/server.json` (`EpochRecord`) is written by `hsx serve` before it becomes the server; the capture plugin
adds `<dump_dir>/<epoch>/capture.json` (`CaptureReport`) once the model is loaded, with what it read back, and before it the
final norm's weight; or, where it cannot capture, `capture.error`. While it captures it holds `capture.lock` and keeps
`counter.json` (`CaptureState`) up to date. All but the lock are published by rename.

A data-parallel server captures once in each of its DP ranks, every one with numbers of its own: rank 0 under the names above,
rank r with `.<r>` before the ending (`capture.1.json`, `final_norm.1.f32`, `counter.1.json`, `capture.1.lock`). Only the
refusal stands once: a server of which one rank cannot capture is of no use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Final

from hsx.core.spec import CaptureSpec, final_state
from hsx.errors import EngineError

RECORD_NAME: Final = "server.json"
REPORT_NAME: Final = "capture.json"
NORM_NAME: Final = "final_norm.f32"
"""The final norm's weight: float32, little endian, [H], without a header. `CaptureReport.norm_file` names it."""
REFUSAL_NAME: Final = "capture.error"
"""Why there is no capture in this epoch, and never will be: one sentence in UTF-8, ended by a newline. Not JSON. Where
a report lies beside it, the refusal counts (a second model was loaded, say)."""
STATE_NAME: Final = "counter.json"
LOCK_NAME: Final = "capture.lock"
"""Held with flock(LOCK_EX) by the one process that captures into this epoch, from install to its death; names its pid."""
SHM_NAME: Final = "shm.json"
"""Which files in /dev/shm the server's processes hold: `hsx.engines.leftovers`. Gone once nothing is left to sweep."""
MAX_RANKS: Final = 1024
"""Data-parallel ranks that hsx keeps account of, at most."""
RECORD_VARIABLE: Final = "HSX_EPOCH_RECORD"
"""Environment variable of the server: the path of its `server.json`, set by `hsx serve` for the capture side."""
FORMAT: Final = 1


def rank_name(name: str, rank: int) -> str:
    """The file of DP rank `rank` that rank 0 has under `name`: `counter.json` is `counter.3.json` for rank 3."""
    stem, dot, ending = name.rpartition(".")
    return f"{stem}{dot}{rank}.{ending}" if rank else name


def stream_name(epoch: str, rank: int) -> str:
    """How the ledger and the shards name what one DP rank captured in an epoch: numbers are unique within a stream.

    It is the epoch itself for rank 0, and `<epoch>.<rank>` for the others, so a server without data parallelism is one stream.
    """
    return f"{epoch}.{rank}" if rank else epoch


def epoch_of(stream: str) -> str:
    """The epoch that a stream belongs to."""
    return stream.partition(".")[0]


def state_name(rank: int = 0) -> str:
    """`CaptureState` of a DP rank."""
    return rank_name(STATE_NAME, rank)


def report_name(rank: int = 0) -> str:
    """`CaptureReport` of a DP rank."""
    return rank_name(REPORT_NAME, rank)


def lock_name(rank: int = 0) -> str:
    """The lock of a DP rank."""
    return rank_name(LOCK_NAME, rank)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """Who the server is.

    Attributes:
        epoch: uuid4 in its 36-character form; also the folder's name.
        boot_id: the host's `/proc/sys/kernel/random/boot_id`.
        pid: process id of the server's main process (kept across exec).
        start_ticks: field 22 of `/proc/<pid>/stat`, clock ticks since boot; with boot id and pid it names one process.
        invocation_id: systemd's INVOCATION_ID, or "" outside systemd.
        command: the server's command line.
        model: model path as given to the server.
        revision: model revision as given, or "".
        layers: the k of each h_k to capture.
        final: `post_norm` or `pre_norm`.
        engine: `sglang` or `reference`.
        engine_version: its version.
        plugin_version: version of hsx in the server's environment.
        host: address the HTTP port is bound to.
        port: the HTTP port.
        staging_bytes: size of the capture plugin's pool of host buffers.
        when_full: what it does where the pool is full: `block` or `fail`.
        convert: whether a residual stream in float16 or float32 is rounded to bf16; else such a server is refused.
    """

    epoch: str
    boot_id: str
    pid: int
    start_ticks: int
    invocation_id: str
    command: tuple[str, ...]
    model: str
    revision: str
    layers: tuple[int, ...]
    final: str
    engine: str
    engine_version: str
    plugin_version: str
    host: str
    port: int
    staging_bytes: int = 1 << 30
    when_full: str = "block"
    convert: bool = True


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What the capture plugin found in the loaded model, read back and not merely asked for.

    Attributes:
        epoch: the epoch it belongs to.
        layers: the k of each h_k that is really captured.
        final: `post_norm` or `pre_norm`.
        hidden_size: H.
        model_layers: N.
        vocab_size: size of the vocabulary in the model's config (unpadded).
        norm_eps: epsilon of the final RMS norm.
        norm_file: name of a file beside this one with the final norm's weight: float32, little endian, [H]; "" if unknown.
        engine_version: version of the server's package.
        plugin_version: version of hsx in the server's environment.
        tp_size: processes that share one prefill: each of them holds the full states, and the first one writes.
        dp_size: data-parallel ranks of the server, with or without DP attention; each has its own report and numbers.
        rank: the DP rank that this report is of, from 0.
        architecture: class name of the model, as the server's package has it.
        method: `model` where the model hands the layers out itself, `norms` where they are taken at the layers' input norms.
        head_multiplier: logits = head(norm(h_N)) * head_multiplier; 1.0 where the model has none.
        dtype: the residual stream's dtype in the server, such as `bfloat16`; what is not bfloat16 is rounded to it.
    """

    epoch: str
    layers: tuple[int, ...]
    final: str
    hidden_size: int
    model_layers: int
    vocab_size: int
    norm_eps: float
    norm_file: str
    engine_version: str
    plugin_version: str
    tp_size: int
    dp_size: int
    rank: int
    architecture: str
    method: str
    head_multiplier: float
    dtype: str

    @property
    def spec(self) -> CaptureSpec:
        """The capture spec in force."""
        return CaptureSpec(self.layers, final_state(self.final))


@dataclass(frozen=True, slots=True)
class CaptureState:
    """What the capture side has done so far in this epoch. Never ahead of the dumps: it is written after their renames.

    Attributes:
        epoch: the epoch it belongs to.
        pid: the process that captures (in SGLang a scheduler process, a child of the server's main process).
        start_ticks: field 22 of its `/proc/<pid>/stat`, clock ticks since boot; with the pid it names one process.
        sequence: the largest number given to a dump so far, which is the last; 0 before the first.
        published: dumps published; equal to `sequence`, unless numbers were left out because a writer process died.
        failed: error files left in the place of dumps.
        foreign: requests prefilled whose rid is no marker.
        incomplete: markers given up after a part of them had arrived (aborted or cut requests), without an error file.
        staged_bytes: bytes of host buffers in use: states that are not in a file yet.
        staged_peak_bytes: the most that has been.
        blocked_us: microseconds that forwards have waited for a buffer.
        forward_us: microseconds that the plugin has spent in the forward path otherwise.
        forwards: prefill forwards that it spent them in.
        rank: the DP rank that counts, 0 without data parallelism.
    """

    epoch: str
    pid: int
    start_ticks: int
    sequence: int
    published: int
    failed: int
    foreign: int
    incomplete: int
    rank: int
    staged_bytes: int = 0
    staged_peak_bytes: int = 0
    blocked_us: int = 0
    forward_us: int = 0
    forwards: int = 0


COUNTS: Final = tuple(f.name for f in fields(CaptureState) if f.name not in {"epoch", "pid", "start_ticks", "rank"})
"""Names of the fields of `CaptureState` that count."""


def to_json(record: EpochRecord | CaptureReport | CaptureState) -> str:
    """The record as a JSON object with its format number.

    A state is one line: it is written ten times a second, and an indented one costs ten times as much.
    """
    document = {"format": FORMAT, **{field.name: getattr(record, field.name) for field in fields(record)}}
    return json.dumps(document, indent=None if isinstance(record, CaptureState) else 1, sort_keys=True)


def record_from_json(text: str) -> EpochRecord:
    """Reads `server.json`. Raises EngineError `epoch_unknown` for any deviation."""
    return EpochRecord(**_decode(text, EpochRecord, RECORD_NAME))


def report_from_json(text: str) -> CaptureReport:
    """Reads `capture.json`. Raises EngineError `epoch_unknown` for any deviation."""
    return CaptureReport(**_decode(text, CaptureReport, REPORT_NAME))


def state_from_json(text: str) -> CaptureState:
    """Reads `counter.json`. Raises EngineError `epoch_unknown` for any deviation."""
    return CaptureState(**_decode(text, CaptureState, STATE_NAME))


def _decode(text: str, record: type[Any], name: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
        if document.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        names = {field.name: field.type for field in fields(record)}
        if set(document) != set(names):
            raise ValueError(f"fields differ: {sorted(set(document) ^ set(names))}")
        for key, kind in names.items():
            value = document[key]
            if str(kind).startswith("tuple"):
                wanted = int if "int" in str(kind) else str
                if not isinstance(value, list) or not all(type(v) is wanted for v in value):
                    raise ValueError(f"{key} is {value!r}; expected a list of {wanted.__name__}")
                document[key] = tuple(value)
            elif type(value) is not {"int": int, "float": float, "str": str, "bool": bool}[str(kind)]:
                raise ValueError(f"{key} is {value!r}; expected {kind}")
        if "final" in names:
            final_state(document["final"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError("epoch_unknown", f"{name} cannot be read: {error}") from error
    return dict(document)
