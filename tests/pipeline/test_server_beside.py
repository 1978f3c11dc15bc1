"""A server that nobody uses still lives in the dump directory: hsx says so, and does its work with the right one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from uuid import uuid4

from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_running
from hsx.testing.idle_server import record_of, write_record
from hsx.testing.servers import running_reference

if TYPE_CHECKING:
    from hsx.testing.tiny_job import TinyJob


def test_an_old_server_beside_is_told_in_the_log(job: TinyJob) -> None:
    """Its dumps, and those of the one in use, are told apart by their folders; its memory is not hsx's to free."""
    old = record_of(os.getpid(), str(uuid4()))
    write_record(job.loaded.dump_dir, old)
    port, model = job.loaded.config.engine.port, job.loaded.model
    with (
        running_reference(job.loaded.dump_dir, job.loaded.config.capture.layers, model=model, port=port) as server,
        hsx_running(job.folder / "job.toml", "run") as running,
    ):
        assert running.wait() == ExitCode.DONE, running.log.read_text()
        reasons = [event["reason"] for event in running.events("engine.waiting")]
        assert [event["epoch"] for event in running.events("epoch.began")] == [server.record.epoch]
    told = f"another server still lives in {job.loaded.dump_dir}: epoch {old.epoch}, pid {os.getpid()}, port 7"
    assert any(told in reason for reason in reasons)
