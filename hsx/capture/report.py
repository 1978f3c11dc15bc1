"""The capture report: what the plugin found in the loaded model, and why it could not capture.

`capture.json` and `final_norm.f32` lie beside `server.json` in the epoch's folder, those of DP rank r under the names that
`hsx.core.epoch.rank_name` gives them. The report is published by rename and
last, so that whoever sees it sees its norm file too. Where capture is impossible, `capture.error` says why instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsx.core.dump import PART_SUFFIX
from hsx.core.epoch import NORM_NAME, REFUSAL_NAME, CaptureReport, rank_name, report_name, to_json

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def write_report(folder: Path, report: CaptureReport, norm_weight: NDArray[np.float32] | None) -> None:
    """Publishes the report, after the final norm's weight.

    Args:
        folder: `<dump_dir>/<epoch>`.
        report: its `norm_file` must be `NORM_NAME`, as its rank has it, where a weight is given and "" where none is.
        norm_weight: float32 [H], or None where the final norm is not a plain RMS norm.

    Raises:
        ValueError: report and weight contradict each other.
        OSError: a file cannot be written.
    """
    named = rank_name(NORM_NAME, report.rank) if norm_weight is not None else ""
    if report.norm_file != named:
        raise ValueError(f"norm_file is {report.norm_file!r}; expected {named!r}")
    if norm_weight is not None:
        if norm_weight.shape != (report.hidden_size,) or norm_weight.dtype != np.float32:
            raise ValueError(
                f"norm weight is {norm_weight.dtype} {norm_weight.shape}; expected float32 ({report.hidden_size},)"
            )
        _publish(folder, named, named, norm_weight.astype("<f4").tobytes())
    name = report_name(report.rank)
    _publish(folder, name, name, to_json(report).encode())


def read_norm(folder: Path, report: CaptureReport) -> NDArray[np.float32] | None:
    """The final norm's weight, float32 [H], that lies beside a report; None where the report names no file.

    Raises OSError, or ValueError where the file has another size than H floats.
    """
    if not report.norm_file:
        return None
    data = (folder / report.norm_file).read_bytes()
    if len(data) != 4 * report.hidden_size:
        raise ValueError(f"{report.norm_file} has {len(data)} bytes; expected {4 * report.hidden_size}")
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def write_refusal(folder: Path, reason: str, rank: int = 0) -> None:
    """Publishes `capture.error`: `reason`, on one line, says why there is no capture in this epoch. Raises OSError.

    Of several DP ranks that refuse, the last one's reason stands; `rank` keeps them from writing into each other's file.
    """
    said = f"DP rank {rank}: {reason}" if rank else reason
    _publish(folder, REFUSAL_NAME, rank_name(REFUSAL_NAME, rank), (" ".join(said.split()) + "\n").encode())


def _publish(folder: Path, name: str, drafted_as: str, data: bytes) -> None:
    part = folder / (drafted_as + PART_SUFFIX)
    part.write_bytes(data)
    part.rename(folder / name)
