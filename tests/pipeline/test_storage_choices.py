"""Whole runs with each way of storing: the truth is stored, shards say whose they are, and what is fixed stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hsx.config_load import load
from hsx.errors import RunError
from hsx.prepare import prepare
from hsx.stores.checksum import ids_digest
from hsx.stores.group import open_store
from hsx.stores.reader import Store
from hsx.stores.shard_reader import read_record
from hsx.testing.jobs import write_job
from hsx.testing.promise import committed_rows, damages
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.tiny_job import TinyJob


@pytest.mark.parametrize(
    "storage",
    [
        {},
        {"codec": "zstd", "durability": "relaxed"},
        {"codec": "blosc", "writer": "zarr"},
        {"writer": "zarr", "chunk_tokens": 16},
        {"chunk_tokens": 8},
        {"chunk_tokens": 8, "dtype": "fp8_e4m3"},
    ],
)
async def test_a_run_stores_the_truth(job_of: Callable[..., TinyJob], storage: dict[str, Any]) -> None:
    job = job_of(samples=6, storage=storage)
    async with job.server():
        outcome = await job.run()
    assert (outcome.committed, outcome.violations) == (6, {})
    assert wrong_samples(job.loaded) == []
    assert damages(job.loaded) == []
    info, store = open_store(job.loaded.store), Store(job.loaded.store)
    assert info.layout.codec == storage.get("codec", "none")
    assert info.layout.chunk_tokens == storage.get("chunk_tokens", 64)
    for index, row in committed_rows(job.loaded).items():
        record = read_record(info.folder(row.root) / f"c.{index}.0.0.0", info.layout)
        assert (record.store, record.index, record.marker, record.epoch) == (info.store_id, index, row.marker, row.epoch)
        assert (record.sequence, record.tokens, record.crc32c) == (row.sequence, row.tokens, row.crc32c)
        assert record.ids == ids_digest(store.input_ids_numpy(index))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"codec": "zstd"}, {"codec": "blosc"}, r"storage\.codec"),
        ({}, {"chunk_tokens": 32}, r"storage\.chunk_tokens: the job was started with '64', now it is '32'"),
    ],
)
def test_a_job_keeps_what_its_store_was_made_with(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], told: str
) -> None:
    prepare(load(write_job(tmp_path, {"storage": before})), lambda _rows, _tokens: None)
    with pytest.raises(RunError, match=told) as error:
        prepare(load(write_job(tmp_path, {"storage": after})), lambda _rows, _tokens: None)
    assert error.value.kind == "job_changed"
