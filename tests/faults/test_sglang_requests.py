"""The fault matrix on the real SGLang, what a living server is put through: one server for all rows, one job for each.

Hugging Face in float32 says what the states are. No test depends on speed: what has to be in the middle of something is held
there, with the process that does it stopped, until it was seen; and samples start so slowly that a job is not over before.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from hsx.core.dump import SUFFIX
from hsx.core.epoch import RECORD_NAME, STATE_NAME, CaptureState, state_from_json, to_json
from hsx.core.marker import Marker, parse
from hsx.exit_codes import ExitCode
from hsx.testing.capture_server import CPU_VARIABLES, START_S, CaptureServer
from hsx.testing.commands import HsxProcess, hsx_done, hsx_running, log_lines, wait_until
from hsx.testing.huggingface import HuggingFace
from hsx.testing.servers import RunningServer, running
from hsx.testing.sglang_job import (
    LAYERS,
    PATIENCE_S,
    SGLangJob,
    dumps_of,
    external,
    frozen,
    half_done,
    interpreter,
    make_sglang_job,
    random_prompts,
    scheduler_of,
)
from hsx.testing.tiny_models import make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]

CONTEXT = 2048
QUEUE = 24
NEVER = {"commit_seconds": 3600.0, "commit_samples": 1000}
"""A group commit that waits for an hour: every dump is there, every shard is written, and nothing is committed."""
FULL = {"without a page": 0, "without room for a dump": 64 * 1024}
"""Bytes left on the full tmpfs: none at all, or enough for the words that say so and too few for any dump of the job."""


@dataclass(frozen=True)
class Shared:
    """The server of all tests here, with the means to bring faults about.

    Attributes:
        server: the process, its record and its folder.
        model: the model it serves.
        judge: the same in Hugging Face.
        small: its dump directory is a tmpfs of its own.
    """

    server: RunningServer
    model: Path
    judge: HuggingFace
    small: bool

    @property
    def dump_dir(self) -> Path:
        return self.server.folder.parent

    @property
    def port(self) -> int:
        return self.server.record.port

    @property
    def scheduler(self) -> int:
        return scheduler_of(self.server.record.pid)

    def job(self, folder: Path, prompts: list[list[int]], **changes: dict[str, Any]) -> SGLangJob:
        """One that uses this server."""
        engine = {**external(self.port), **changes.pop("engine", {})}
        return make_sglang_job(folder, self.model, self.dump_dir, engine, prompts, **changes)

    def counted(self) -> CaptureState:
        """What the capture side says it has done so far."""
        return state_from_json((self.server.folder / STATE_NAME).read_text())

    def get(self, path: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S) as answer:
            answer.read()
            return int(answer.status)

    def post(self, path: str, body: dict[str, Any]) -> int:
        """The status of the answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def prefill(self, rid: str, ids: list[int]) -> int:
        """Asks for one prompt, as any client might."""
        return self.post("/generate", {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": 0}})

    def prefill_and_hang_up(self, marker: Marker, ids: list[int]) -> None:
        """Closes the connection while the prompt is being prefilled."""
        body = json.dumps({"rid": str(marker), "input_ids": ids, "sampling_params": {"max_new_tokens": 0}}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: bool(list(self.server.folder.glob(f"{marker}.*"))), f"the prefill of {marker}", PATIENCE_S)


@contextmanager
def small_tmpfs(folder: Path, size: str) -> Iterator[bool]:
    """Mounts a tmpfs there, where that is allowed."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    python, folder = interpreter(), tmp_path_factory.mktemp("sglang")
    model = make("llama", folder / "model")
    arguments = ["--context-length", str(CONTEXT), "--max-queued-requests", str(QUEUE)]
    capture = CaptureServer(python, folder, model, LAYERS, arguments=arguments)
    with (
        small_tmpfs(folder / "dumps", "64m") as small,
        running(capture.command(), folder / "dumps", capture.epoch, capture.port, CPU_VARIABLES, START_S) as server,
    ):
        yield Shared(server, model, HuggingFace(model), small)


@pytest.fixture(autouse=True)
def the_server_lives_on(shared: Shared) -> Iterator[None]:
    """No row costs the server anything."""
    yield
    assert shared.server.process.poll() is None
    assert shared.get("/model_info") == 200


def finish(job: SGLangJob, *earlier: HsxProcess, code: ExitCode = ExitCode.DONE) -> list[dict[str, Any]]:
    """Runs or continues the job to its end; returns the log of all its runs."""
    done = hsx_done(job.path, "run", patience_s=PATIENCE_S)
    return ended(done, *earlier, code=code)


def ended(last: HsxProcess, *earlier: HsxProcess, code: ExitCode = ExitCode.DONE) -> list[dict[str, Any]]:
    assert last.wait(PATIENCE_S) == code, last.log.read_text()[-6000:]
    return log_lines(*(run.log for run in earlier), last.log)


def began(process: HsxProcess) -> None:
    """Returns once the server has passed the gate."""
    wait_until(lambda: bool(process.events("epoch.began")) or process.process.poll() is not None, "epoch.began", PATIENCE_S)
    assert process.events("epoch.began"), process.log.read_text()[-6000:]


def killed(job: SGLangJob, when: Callable[[], bool]) -> HsxProcess:
    """Runs the job until `when()`, and kills hsx with -9."""
    with hsx_running(job.path, "run") as process:
        began(process)
        wait_until(lambda: when() or process.process.poll() is not None, "the moment to kill hsx", PATIENCE_S)
        process.kill()
        assert process.process.returncode == -signal.SIGKILL, process.log.read_text()[-6000:]
    return process


def other_prompt(ids: list[int]) -> list[int]:
    """Another prompt of the same length."""
    return [(token + 1) % 1000 for token in ids]


def other_run() -> str:
    """The 8 hex digits of a job that is not ours; a server takes each marker once."""
    return uuid.uuid4().hex[:8]


# --- stale dumps ----------------------------------------------------------------------------------------------------


def test_stale_dumps_of_older_attempts(shared: Shared, tmp_path: Path, seen: Callable[..., Any]) -> None:
    """hsx is killed twice; the dumps of the first attempts come after the second ones' are there."""
    prompts = random_prompts(12, 40, 400)
    slow = shared.job(tmp_path / "job", prompts, pipeline=NEVER)
    folder = shared.server.folder
    first = killed(slow, lambda: len(dumps_of(folder, slow.run_id())) == len(prompts))
    run = slow.run_id()
    old, new = ({slow.marker(index, attempt) for index in range(len(prompts))} for attempt in (1, 2))
    for marker in old:
        (folder / f"{marker}{SUFFIX}").rename(folder / f"{marker}.late")
    second = killed(slow, lambda: set(dumps_of(folder, run)) == new)
    for marker in old:
        (folder / f"{marker}.late").rename(folder / f"{marker}{SUFFIX}")
    job = shared.job(tmp_path / "job", prompts)
    log = finish(job, first, second)
    seen("stale_attempt", job.loaded, log=log, engine="sglang", truth=job.truth(shared.judge))
    with job.ledger() as ledger:
        rows = [ledger.sample(index) for index in range(len(prompts))]
    assert [(row.adopted, row.attempts, row.marker) for row in rows] == [
        (True, 2, str(job.marker(index, 2))) for index in range(len(prompts))
    ]
    assert dumps_of(folder, run) == []


def test_stale_dumps_of_another_run(shared: Shared, tmp_path: Path, seen: Callable[..., Any]) -> None:
    """Dumps with the same index, attempt and length lie there from the start, and more come while the job runs."""
    prompts = random_prompts(16, 40, 300)
    job = shared.job(tmp_path / "job", prompts)
    folder = shared.server.folder
    other = other_run()
    theirs = [Marker(other, index, 1, len(ids)) for index, ids in enumerate(prompts)]
    for marker, ids in list(zip(theirs, prompts, strict=True))[::2]:
        assert shared.prefill(str(marker), other_prompt(ids)) == 200
    dead = replace(shared.server.record, epoch=str(uuid.uuid4()), pid=1, start_ticks=0)
    left = folder.with_name(dead.epoch)
    left.mkdir()
    (left / RECORD_NAME).write_text(to_json(dead))
    (left / f"{theirs[0]}{SUFFIX}").write_bytes((folder / f"{theirs[0]}{SUFFIX}").read_bytes())
    with hsx_running(job.path, "run") as process:
        began(process)
        for marker, ids in list(zip(theirs, prompts, strict=True))[1::2]:
            assert shared.prefill(str(marker), other_prompt(ids)) == 200
        log = ended(process)
    seen("stale_run", job.loaded, log=log, engine="sglang", truth=job.truth(shared.judge))
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}
    assert set(dumps_of(folder, other)) == set(theirs)  # they are not ours to remove
    assert not left.exists()  # whereas a dead server's are nobody's
    for marker in theirs:
        (folder / f"{marker}{SUFFIX}").unlink()


# --- others on the same server --------------------------------------------------------------------------------------


def test_as_many_foreign_requests_as_ours(shared: Shared, tmp_path: Path, seen: Callable[..., Any]) -> None:
    """As many others at once as hsx has, of the same lengths, from before hsx begins until it has ended."""
    prompts = random_prompts(32, 20, 300)
    job = shared.job(tmp_path / "job", prompts)
    over, answered = threading.Event(), list[int]()

    def other_client(number: int) -> None:
        for turn in range(10**6):
            if over.is_set():
                return
            ids = other_prompt(prompts[(8 * turn + number) % len(prompts)])
            answered.append(shared.prefill(f"chat-{number}-{turn}", ids))

    before, dumps = shared.counted(), set(shared.server.folder.glob(f"*{SUFFIX}"))
    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(other_client, number) for number in range(8)]
        try:
            log = finish(job)
        finally:
            over.set()
        for client in clients:
            client.result()
    assert len(answered) >= len(prompts)
    assert set(answered) == {200}
    seen("foreign_requests", job.loaded, log=log, engine="sglang", truth=job.truth(shared.judge))
    with job.ledger() as ledger:
        assert [ledger.sample(index).attempts for index in range(len(prompts))] == [1] * len(prompts)
        assert ledger.violations_by_invariant() == {}
    wait_until(lambda: shared.counted().foreign >= before.foreign + len(answered), "all of them counted", PATIENCE_S)
    assert set(shared.server.folder.glob(f"*{SUFFIX}")) <= dumps


def test_health_probes_and_warm_ups_between_requests(shared: Shared, tmp_path: Path, seen: Callable[..., Any]) -> None:
    """Each probe is a forward of its own, under a name of the server's; at a start a second the job outlasts some."""
    prompts = random_prompts(24, 20, 200)
    job = shared.job(tmp_path / "job", prompts, pipeline={"start_rate": 1.0})
    probes = 0
    with hsx_running(job.path, "run") as process:
        began(process)
        while process.process.poll() is None:
            assert shared.get("/health_generate") == 200
            assert shared.get("/health") == 200
            assert shared.prefill(uuid.uuid4().hex, prompts[probes % len(prompts)]) == 200
            probes += 1
        log = ended(process)
    assert probes >= 2
    seen("probes_and_warmups", job.loaded, log=log, engine="sglang", truth=job.truth(shared.judge))
    with job.ledger() as ledger:
        assert [ledger.sample(index).attempts for index in range(len(prompts))] == [1] * len(prompts)
        assert ledger.violations_by_invariant() == {}


def test_clients_that_abort(shared: Shared, tmp_path: Path, seen: Callable[..., Any]) -> None:
    """Somebody aborts prompts of ours in the middle, then all there are; and another client hangs up in the middle of its own.

    The scheduler stands still between the look at the half-done prompt and its abort; only a prompt whose last chunk is under
    way may still be finished, so it is tried until three attempts have failed.
    """
    prompts = random_prompts(30, 800, 1200)
    job = shared.job(tmp_path / "job", prompts, pipeline={"retries": 30, "start_rate": 2.0})
    folder, enough = shared.server.folder, 3

    with hsx_running(job.path, "run") as process:
        began(process)
        run, aborted = job.run_id(), set[Marker]()
        with ThreadPoolExecutor(1) as pool:
            theirs = Marker(other_run(), 1, 1, 1500)
            hung_up = pool.submit(shared.prefill_and_hang_up, theirs, random_prompts(1, 1500, 1500)[0])
            while len(process.events("attempt.failed")) < enough and process.process.poll() is None:
                if set(half_done(folder, run)) - aborted:
                    with frozen(shared.scheduler):
                        caught = set(half_done(folder, run)) - aborted
                        for marker in caught:
                            assert shared.post("/abort_request", {"rid": str(marker)}) == 200
                    aborted |= caught
                    wait_until_over(process, caught)
                time.sleep(0.005)
            hung_up.result()
            with frozen(shared.scheduler):
                assert shared.post("/abort_request", {"abort_all": True}) == 200
        log = ended(process)
    seen("client_aborts", job.loaded, log=log, engine="sglang", events=["attempt.failed"], truth=job.truth(shared.judge))
    with job.ledger() as ledger:
        assert sum(ledger.failures_by_reason().values()) >= enough
        again = {marker.index for marker in aborted if ledger.sample(marker.index).attempts > 1}
    assert len(again) >= enough
    assert dumps_of(folder, run) == []
    for path in folder.glob(f"hsx1-{theirs.run}-*"):
        path.unlink()


def wait_until_over(process: HsxProcess, markers: set[Marker]) -> None:
    """Returns once these attempts have ended, well or not."""

    def over() -> bool:
        lines = [*process.events("attempt.failed"), *process.events("sample.committed")]
        return markers <= {parse(line["marker"]) for line in lines} or process.process.poll() is not None

    wait_until(over, f"the end of {', '.join(map(str, markers))}", PATIENCE_S)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_full_queue(shared: Shared, tmp_path: Path, seen: Callable[..., Any]) -> None:
    """More requests than the queue takes, all of them there before the scheduler looks at the first."""
    prompts = random_prompts(90, 10, 100)
    job = shared.job(tmp_path / "job", prompts, pipeline={"concurrency": 64, "start_rate": 3.0})
    with hsx_running(job.path, "run") as process:
        began(process)
        url = process.events("status.listening")[0]["url"] + "/status"
        while not met(process, "server_full") and process.process.poll() is None:
            with frozen(shared.scheduler):
                wait_until(
                    lambda: (
                        in_flight(url) > QUEUE + 8 or bool(met(process, "server_full")) or process.process.poll() is not None
                    ),
                    "more requests than the queue takes",
                    PATIENCE_S,
                )
            time.sleep(0.2)
        log = ended(process)
    assert met(process, "server_full")
    seen("queue_full", job.loaded, log=log, engine="sglang", events=["error.met"], truth=job.truth(shared.judge))
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}
        assert ledger.violations_by_invariant() == {}


def met(process: HsxProcess, kind: str) -> list[dict[str, Any]]:
    """The errors of this kind that the log tells of."""
    return [line for line in process.events("error.met") if line["kind"] == kind]


def in_flight(status: str) -> int:
    """Requests at the server, as the status document has them; 0 where it is not served any more."""
    with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(status, timeout=PATIENCE_S) as answer:
        return int(json.loads(answer.read())["in_flight"]["requests"])
    return 0


@contextmanager
def boastful(server: RunningServer) -> Iterator[str]:
    """A relay before the server that tells of twice its limit and passes everything else on.

    Yields its host, another loopback address, on which it has the server's own port.
    """
    host = "127.0.0.2"
    base = f"http://127.0.0.1:{server.record.port}"

    class Relay(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.relay(urllib.request.Request(base + self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.relay(urllib.request.Request(base + self.path, body, {"Content-Type": "application/json"}))

        def relay(self, request: urllib.request.Request) -> None:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    status, payload = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    status, payload = error.code, error.read()
            if self.path == "/server_info":
                document = json.loads(payload)
                payload = json.dumps({**document, "max_req_input_len": 2 * document["max_req_input_len"]}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer((host, server.record.port), Relay) as relay:
        thread = threading.Thread(target=relay.serve_forever)
        thread.start()
        try:
            yield host
        finally:
            relay.shutdown()
            thread.join()


def test_sample_too_long_for_the_server(shared: Shared, tmp_path: Path, seen: Callable[..., Any]) -> None:
    """Refused at the gate, before anything is sent; and where the server had told too high a limit, quarantined at its 400."""
    too_long = CONTEXT + 50
    prompts = [*random_prompts(11, 20, 200), random_prompts(1, too_long, too_long)[0]]
    job = shared.job(tmp_path / "job", prompts)
    refused = hsx_done(job.path, "run", patience_s=PATIENCE_S)
    assert refused.process.returncode == ExitCode.RUN_ERROR
    assert "[server_refused]" in refused.error()
    assert f"the longest sample has {too_long}" in refused.error()
    assert dumps_of(shared.server.folder, job.run_id()) == []
    with boastful(shared.server) as host:
        job = shared.job(tmp_path / "job", prompts, engine={"host": host})
        log = finish(job, refused, code=ExitCode.INCOMPLETE)
    seen(
        "too_long",
        job.loaded,
        log=log,
        engine="sglang",
        quarantined={"request_refused": 1},
        events=["sample.quarantined"],
        truth=job.truth(shared.judge),
    )
    with job.ledger() as ledger:
        (row,) = ledger.quarantined()
        assert (row.index, row.attempts) == (11, 1)
        assert "HTTP 400" in row.evidence
        assert ledger.failures_by_reason() == {"request_refused": 1}


def test_ids_outside_the_vocabulary(shared: Shared, tmp_path: Path, seen: Callable[..., Any]) -> None:
    """Such an id ends the whole server: it is a bad row, and not one byte of it is sent."""
    good = random_prompts(12, 20, 200)
    bad = [[5, 6, 1000], [1024], [7, -1, 8], [2**40]]
    job = shared.job(tmp_path / "job", [*bad[:2], *good, *bad[2:]])
    refused = hsx_done(job.path, "run", patience_s=PATIENCE_S)
    assert refused.process.returncode == ExitCode.REFUSED
    assert "[dataset_rejected]" in refused.error()
    job = shared.job(tmp_path / "job", [*bad[:2], *good, *bad[2:]], dataset={"on_bad_row": "skip"})
    job = replace(job, prompts=good)
    log = finish(job)
    seen("out_of_vocabulary", job.loaded, log=log, engine="sglang", rejected=len(bad), truth=job.truth(shared.judge))
    with job.ledger() as ledger:
        assert {row.reason for row in ledger.rejected()} <= {"out_of_vocabulary", "bad_type"}
        assert ledger.failures_by_reason() == {}


# --- the dump directory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", FULL.values(), ids=FULL.keys())
def test_full_dump_directory(shared: Shared, tmp_path: Path, seen: Callable[..., Any], spare: int) -> None:
    """The tmpfs is full while a prompt is at the server, and free again once hsx has noticed."""
    if not shared.small:
        assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount"
        pytest.skip("mounting a tmpfs needs root")
    prompts = random_prompts(16, 100, 300)
    job = shared.job(tmp_path / "job", prompts, pipeline={"concurrency": 4, "start_rate": 1.0})
    filler = shared.dump_dir / "filler"
    with hsx_running(job.path, "run") as process:
        began(process)
        url = process.events("status.listening")[0]["url"] + "/status"
        with frozen(shared.scheduler):
            # Once it is full, hsx asks for nothing more: a prompt has to be at the server already.
            wait_until(lambda: in_flight(url) > 0 or process.process.poll() is not None, "a prompt at the server", PATIENCE_S)
            fill(filler, spare)
        try:
            wait_until(
                lambda: bool(met(process, "staging_full")) or process.process.poll() is not None, "staging_full", PATIENCE_S
            )
        finally:
            filler.unlink()
        log = ended(process)
    assert met(process, "staging_full")
    assert "could not be written" in met(process, "staging_full")[0]["message"]
    seen("staging_full", job.loaded, log=log, engine="sglang", events=["error.met"], truth=job.truth(shared.judge))
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}
        assert ledger.violations_by_invariant() == {}
    assert list(shared.server.folder.glob(f"hsx1-{job.run_id()}-*")) == []


def fill(filler: Path, spare: int) -> None:
    """Takes all but `spare` bytes of the file system."""
    with filler.open("wb") as file:
        space = os.statvfs(filler)
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - spare)


# --- the seed story -------------------------------------------------------------------------------------------------


def test_seed_story(shared: Shared, tmp_path: Path, seen: Callable[..., Any]) -> None:
    """Warm-ups, the client killed with requests under way and started again, the server never: it has counted all of it."""
    prompts = random_prompts(24, 100, 600)
    slow = shared.job(tmp_path / "job", prompts, pipeline={**NEVER, "start_rate": 1.0})
    folder = shared.server.folder
    for number in range(5):
        assert shared.prefill(uuid.uuid4().hex, prompts[number]) == 200
    with hsx_running(slow.path, "run") as first:
        began(first)
        wait_until(lambda: len(dumps_of(folder, slow.run_id())) >= 6, "some dumps", PATIENCE_S)
        with frozen(shared.scheduler):
            assert len(dumps_of(folder, slow.run_id())) < len(prompts)
            first.kill()
    for number in range(5):
        assert shared.prefill(uuid.uuid4().hex, prompts[-number]) == 200
    job = shared.job(tmp_path / "job", prompts)
    log = finish(job, first)
    seen("seed_story", job.loaded, log=log, engine="sglang", events=["epoch.began"], truth=job.truth(shared.judge))
    lives = [(line["epoch"], line["continued"]) for line in log if line["event"] == "epoch.began"]
    assert lives == [(shared.server.record.epoch, False), (shared.server.record.epoch, True)]
    with job.ledger() as ledger:
        rows = [ledger.sample(index) for index in range(len(prompts))]
        assert ledger.failures_by_reason() == {}
        assert ledger.violations_by_invariant() == {}
    assert sum(row.adopted for row in rows) >= 6
    assert dumps_of(folder, job.run_id()) == []
