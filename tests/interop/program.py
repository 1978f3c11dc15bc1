"""Reads a store with what is installed: `python program.py STORE SAMPLES OUT` writes `<way>-<sample>.npy` for each way."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorstore
import zarr


def main(store: Path, samples: int, out: Path) -> None:
    """Saves the bf16 bits that each way gives for each whole sample, with what lies behind it up to the longest."""
    for name, path in (
        ("zarr", "zarr.core.codec_pipeline.BatchedCodecPipeline"),
        ("zarrs", "zarrs.ZarrsCodecPipeline"),
    ):
        # Strict: what zarrs cannot do by itself is an error, and not left to zarr.
        with zarr.config.set({"codec_pipeline.path": path, "codec_pipeline.strict": True}):
            array = zarr.open_group(store, mode="r")["hidden_states"]
            assert isinstance(array, zarr.Array)
            for index in range(samples):
                np.save(out / f"{name}-{index}.npy", np.asarray(array[index]))
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(store / "hidden_states")}}
    theirs = tensorstore.open(spec, read=True).result()
    assert theirs.dtype == tensorstore.bfloat16
    for index in range(samples):
        np.save(out / f"tensorstore-{index}.npy", theirs[index].read().result().view(np.uint16))
    import hsx  # only now: zarr has to find the data type by itself

    opened = hsx.open(store)
    for index in range(samples):
        np.save(out / f"hsx-{index}.npy", opened.hidden_states_numpy(index))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
