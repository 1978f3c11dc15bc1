"""hsx itself stands still, or its wall clock jumps: nothing is blamed on the server, and nothing goes wrong."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import POLL_S, HsxProcess, hsx_running, log_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.fault_matrix import Result
    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

pytestmark = pytest.mark.slow

STOPPED_S = 60.0

# Takes the wall clock back by as many seconds as the file that CLOCK_OFFSET_FILE names says; monotonic clocks stay.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
    char text[32] = {0};
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    return got > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, now);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out) *out = precise.tv_sec;
    return precise.tv_sec;
}
"""


async def held(server: RunningServer, process: subprocess.Popen[bytes], before: int) -> None:
    """Returns once the server has come to a prompt that it holds."""
    while (await server.struck()).get("hold", 0) == before:
        assert process.poll() is None
        await asyncio.sleep(POLL_S)


async def test_hsx_stopped_for_a_minute(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    """Every deadline is shorter than the minute; the server works on meanwhile."""
    job = job_of(
        pipeline={"dump_deadline_s": 40.0, "request_slack": 1.0}, watchdog={"grace_s": 40.0, "slowest_tokens_per_s": 1000.0}
    )
    before = (await server.struck()).get("hold", 0)
    await server.fault("hold", count=-1, match="-6-1-")
    with hsx_running(job.loaded.path, "run") as running:
        await held(server, running.process, before)
        running.send(signal.SIGSTOP)
        await server.clear_faults()
        await asyncio.sleep(STOPPED_S)
        running.send(signal.SIGCONT)
        assert await asyncio.to_thread(running.wait) == ExitCode.DONE, running.error()
    seen("hsx_stopped", job.loaded, log=log_lines(running.log))
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}


def shim(folder: Path) -> Path:
    """The shared object; compiled here, because it is of use to nobody else."""
    compiler = shutil.which("cc")
    if compiler is None:
        assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount, strace and cc"
        pytest.skip("needs a C compiler")
    source, built = folder / "clock.c", folder / "clock.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", built, source, "-ldl"], check=True)
    return built


def started(job: TinyJob, env: dict[str, str]) -> HsxProcess:
    """`hsx run` with further environment variables."""
    out, log = job.folder / "run.out", job.folder / "run.log"
    command = [sys.executable, "-m", "hsx", "run", str(job.loaded.path)]
    with out.open("wb") as output, log.open("wb") as errors:
        return HsxProcess(subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, **env}), out, log)


async def test_the_wall_clock_steps_back_an_hour(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result], tmp_path: Path
) -> None:
    job = job_of()
    offset = tmp_path / "offset"
    offset.write_text("0")
    before = (await server.struck()).get("hold", 0)
    await server.fault("hold", count=-1, match="-6-1-")
    running = await asyncio.to_thread(started, job, {"LD_PRELOAD": str(shim(tmp_path)), "CLOCK_OFFSET_FILE": str(offset)})
    try:
        await held(server, running.process, before)
        offset.write_text("-3600")
        await server.clear_faults()
        assert await asyncio.to_thread(running.wait) == ExitCode.DONE, running.error()
    finally:
        running.kill()
    log = running.log
    seen("clock_back", job.loaded, log=log_lines(log))
    times = [datetime.datetime.fromisoformat(line["timestamp"]) for line in log_lines(log)]
    # Lines of different threads may be out of order: one that was stamped before the step may be written after one of later.
    back = [one - other for one, other in itertools.pairwise(times) if one - other > datetime.timedelta(minutes=10)]
    assert back, "the clock did not step"
    assert max(back) > datetime.timedelta(minutes=50)
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}
