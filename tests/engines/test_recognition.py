"""That a server lives does not mean that it is the one that answers: who listens on the port, and who else lives there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from hsx.engines.external import ExternalOwner, find_server, look_for
from hsx.engines.listeners import Hold, holds_port, listeners, taken
from hsx.errors import EngineError
from hsx.testing.idle_server import record_of, write_record
from hsx.testing.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hsx.core.epoch import EpochRecord

LISTENER = """
import os, socket, sys, time
opened = socket.socket()
opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
opened.bind((sys.argv[1], int(sys.argv[2])))
opened.listen()
print("up", flush=True)
if len(sys.argv) > 3 and os.fork():
    opened.close()
    print("passed on", flush=True)
time.sleep(3600)
"""


@contextmanager
def process(*arguments: str, lines: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens: on an address, a port; with a third argument only its child does."""
    started = subprocess.Popen([sys.executable, "-c", LISTENER, *arguments], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert started.stdout is not None
        for _ in range(lines):
            assert started.stdout.readline()
        yield started
    finally:
        os.killpg(started.pid, 9)
        started.communicate()


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[bytes]]:
    """A living process that listens nowhere."""
    sleeper = subprocess.Popen(["sleep", "3600"])
    yield sleeper
    sleeper.kill()
    sleeper.wait()


def publish(dump_dir: Path, pid: int, port: int, host: str = "127.0.0.1") -> EpochRecord:
    """The record of a process, as the server on that port."""
    record = replace(record_of(pid, str(uuid4()), port), host=host)
    write_record(dump_dir, record)
    return record


@pytest.mark.parametrize("below", [False, True])
def test_the_server_listens(tmp_path: Path, below: bool) -> None:
    """Itself, or a process below it, as a server with several workers does."""
    port = free_port()
    with process("127.0.0.1", str(port), *["below"] * below, lines=1 + below) as server:
        record = publish(tmp_path, server.pid, port)
        assert holds_port(record).hold is Hold.HELD
        assert look_for(tmp_path, port) == (record, ())


def test_a_stranger_on_the_port_is_not_taken_for_the_server(tmp_path: Path, idle: subprocess.Popen[bytes]) -> None:
    """The recorded server lives, but another process answers: who, and what was expected, is told."""
    port = free_port()
    record = publish(tmp_path, idle.pid, port)
    with process("127.0.0.1", str(port)) as stranger:
        assert taken("127.0.0.1", port).startswith(f"process {stranger.pid} (")
        with pytest.raises(EngineError) as caught:
            find_server(tmp_path, port)
    assert caught.value.kind == "epoch_unknown"
    assert re.match(
        rf"the server of epoch {record.epoch} \(pid {idle.pid}\) lives, but port {port} is held by process {stranger.pid} "
        rf"\(.*\); expected that server or a process below it",
        caught.value.message,
    )
    assert taken("127.0.0.1", port) == ""
    assert find_server(tmp_path, port) == record


def test_a_port_that_is_shared_with_a_stranger(tmp_path: Path) -> None:
    """With SO_REUSEPORT the kernel would give every other request to the stranger."""
    port = free_port()
    with process("127.0.0.1", str(port)) as server, process("0.0.0.0", str(port)) as stranger:
        publish(tmp_path, server.pid, port)
        with pytest.raises(EngineError, match=f"held by process {stranger.pid}"):
            find_server(tmp_path, port)


def test_the_port_of_another_address_is_another_port(tmp_path: Path, idle: subprocess.Popen[bytes]) -> None:
    """Whoever listens on 127.0.0.2 takes nothing from a server on 127.0.0.1; a server on all addresses it would."""
    port = free_port()
    record = publish(tmp_path, idle.pid, port)
    with process("127.0.0.2", str(port)):
        assert find_server(tmp_path, port) == record
        assert holds_port(replace(record, host="0.0.0.0")).hold is Hold.TAKEN
        assert holds_port(replace(record, host="localhost")).hold is Hold.TAKEN


def test_addresses_of_both_families() -> None:
    """A socket on all IPv6 addresses takes IPv4 connections as well; loopback addresses are told apart."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as opened:
        inode, port = os.fstat(opened.fileno()).st_ino, opened.getsockname()[1]
        assert listeners("127.0.0.1", port) == listeners("::1", port) == listeners("a.name", port) == {inode}
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as opened:
        inode, port = os.fstat(opened.fileno()).st_ino, opened.getsockname()[1]
        assert listeners("::1", port) == {inode}
        assert listeners("127.0.0.1", port) == set()


def test_of_several_servers_the_one_that_listens_is_it(tmp_path: Path, idle: subprocess.Popen[bytes]) -> None:
    """The other still lives: that is told, because it takes memory."""
    port = free_port()
    with process("127.0.0.1", str(port)) as server:
        other = publish(tmp_path, idle.pid, port)
        record = publish(tmp_path, server.pid, port)
        found, notes = look_for(tmp_path, port)
    assert found == record
    assert len(notes) == 1
    assert (
        f"another server still lives in {tmp_path}: epoch {other.epoch}, pid {idle.pid}, port {port} (sleep 3600)" in notes[0]
    )


def test_of_several_servers_none_of_which_listens_none_is_it(tmp_path: Path, idle: subprocess.Popen[bytes]) -> None:
    """Which of them will get the port is not guessed."""
    port = free_port()
    records = [publish(tmp_path, pid, port) for pid in (idle.pid, os.getpid())]
    with pytest.raises(EngineError) as caught:
        find_server(tmp_path, port)
    assert f"2 living servers name port {port}" in caught.value.message
    assert "expected one of them to listen there alone" in caught.value.message
    assert all(f"epoch {record.epoch} (pid {record.pid})" in caught.value.message for record in records)


async def test_an_old_server_on_another_port_is_told(tmp_path: Path, idle: subprocess.Popen[bytes]) -> None:
    """Whether the server is found or not: the owner's situation names what lives beside it."""
    publish(tmp_path, idle.pid, 8)
    with pytest.raises(
        EngineError, match=rf"names port 7; found ports 8; another server still lives in .* pid {idle.pid}, port 8"
    ):
        find_server(tmp_path, 7)
    publish(tmp_path, os.getpid(), 7)
    owner = ExternalOwner(tmp_path, 7, wait_s=0)
    await owner.start()
    assert f"; another server still lives in {tmp_path}" in owner.situation
    assert "end it if nobody needs it" in owner.situation


def test_sockets_that_this_user_may_not_see(tmp_path: Path, idle: subprocess.Popen[bytes]) -> None:
    """A server of another user: that its port was not checked is said, and it is taken."""
    if os.geteuid() != 0:
        assert os.environ.get("CI") != "true", "CI runs every test: as root"
        pytest.skip("only root can be another user for a moment")
    port = free_port()
    publish(tmp_path, idle.pid, port)
    tmp_path.chmod(0o755)
    code = (
        "import os, sys; from pathlib import Path; from hsx.engines.external import look_for\n"
        "os.setuid(65534)\n"
        "print(look_for(Path('.'), int(sys.argv[1])))"
    )
    with process("127.0.0.1", str(port)):
        command = [sys.executable, "-c", code, str(port)]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert f"this user may not see the sockets of process {idle.pid}: its port was not checked" in done.stdout


def test_a_server_in_another_network(tmp_path: Path) -> None:
    """Its sockets are not in this host's table: that its port was not checked is said, and it is taken."""
    if os.geteuid() != 0:
        assert os.environ.get("CI") != "true", "CI runs every test: as root"
        pytest.skip("only root may make a network namespace")
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        far = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 3600"], stdout=subprocess.PIPE)
        try:
            assert far.stdout is not None
            assert far.stdout.readline() == b"\n"
            record = publish(tmp_path, far.pid, port)
            found, notes = look_for(tmp_path, port)
        finally:
            far.kill()
            far.communicate()
    assert found == record
    assert notes == (f"process {far.pid} is in another network namespace: its port was not checked",)
