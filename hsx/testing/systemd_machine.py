"""A machine that runs a real systemd: process 1 of namespaces of its own, for tests of units. Needs root.

Its file system is this machine's, with every change kept aside on a disk of its own, so units, users and journals of a test
reach nobody else. The disk outlives the machine: it may lose power and be booted again, with another boot id. The network is
shared.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.testing.commands import wait_until
from hsx.testing.mounts import mount, tmpfs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INIT: Final = Path(__file__).with_name("systemd_init.sh")
SYSTEMD: Final = Path("/lib/systemd/systemd")
TOOLS: Final = ("unshare", "nsenter", "setpriv", "mount", "systemctl", "dbus-daemon", "pkcheck")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_POWER_OFF: Final = signal.SIGRTMIN + 4
"""What asks process 1 to end all units in order, and itself."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_COMMAND_S: Final = 300.0


def obstacle() -> str:
    """Why no such machine can be made here; "" where it can. `hsx.testing.mounts.obstacle` has more."""
    if os.geteuid() != 0:
        return "systemd as process 1 needs root"
    if not SYSTEMD.exists():
        return "systemd is not installed"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} missing" if missing else ""


class Machine:
    """The machine; `started` makes one and takes it away again.

    Args:
        folder: its disk, an empty folder of a file system that may be the upper layer of an overlay, such as a tmpfs.
        binds: folders of this machine that it sees, too, at other places: place there to folder here.
        variables: environment variables of all its units.
    """

    def __init__(self, folder: Path, binds: Mapping[str, Path], variables: Mapping[str, str]) -> None:
        self._folder = folder
        self._binds = dict(binds)
        self._variables = dict(variables)
        self._outer: subprocess.Popen[bytes] | None = None
        self._init = 0
        self._cgroup: Path | None = None
        self.boot_id = ""

    @property
    def root(self) -> Path:
        """Its root folder, seen from outside, while it runs."""
        return Path(f"/proc/{self._init}/root")

    def boot(self) -> None:
        """Starts it; returns once everything is up. Raises AssertionError, with what it said, where that fails."""
        self.boot_id = str(uuid.uuid4())
        boot = self._folder / "boot-id"
        boot.write_text(self.boot_id + "\n")
        self._cgroup = group = self._make_cgroup()
        environment = {
            "PATH": _PATH,
            "DISK": str(self._folder),
            "BINDS": "\n".join(f"{source}:{target}" for target, source in self._binds.items()),
            "BOOT": str(boot),
            "VARIABLES": " ".join(f"{name}={value}" for name, value in self._variables.items()),
        }
        join = f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))}"
        spaces = "--mount --pid --fork --kill-child=KILL --cgroup --uts --ipc"
        # Whatever becomes of the tests: process 1 dies with them, and the kernel ends all others of its namespace.
        command = f"{join}; exec setpriv --pdeathsig KILL unshare {spaces} sh {shlex.quote(str(INIT))}"
        console = self._folder / "console"
        with console.open("wb") as output:
            self._outer = subprocess.Popen(
                ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        outer = self._outer
        wait_until(lambda: self._is_listening(outer) or outer.poll() is not None, "systemd listens")
        assert outer.poll() is None, f"systemd did not come up: {console.read_text()}"
        state = self.run("systemctl", "is-system-running", "--wait", check=False).stdout.strip()
        assert state == "running", f"{state}: {self.run('systemctl', '--failed', '--plain', check=False).stdout}"

    def power_off(self) -> None:
        """Ends it in order: every unit is stopped."""
        self._end(_POWER_OFF)

    def cut_power(self) -> None:
        """Ends it at once. What was written to its disk is there at the next boot; its memory is lost, /run and each tmpfs."""
        self._end(signal.SIGKILL)

    def run(
        self, *words: str, user: str = "", check: bool = True, timeout_s: float = _COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        """A command on the machine, to its end, as `user` or as root. Raises AssertionError where it fails, if `check`."""
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        inside = ["nsenter", f"--target={self._init}", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--root", "--wd"]
        clean = ["env", "-i", f"PATH={_PATH}", "LANG=C.UTF-8", "TERM=dumb", "SYSTEMD_PAGER=cat", "container=hsx"]
        variables = [f"{name}={value}" for name, value in self._variables.items()]
        command = [*inside, *clean, *variables, *become, *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)
        assert not check or done.returncode == 0, f"{shlex.join(words)}: {done.returncode}: {done.stdout}{done.stderr}"
        return done

    def systemctl(self, *words: str, user: str = "", check: bool = True) -> str:
        """Calls systemctl; returns what it said."""
        done = self.run("systemctl", "--no-ask-password", *words, user=user, check=check)
        return done.stdout + done.stderr

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit, by name."""
        text = self.run("systemctl", "show", *(f"--property={name}" for name in properties), unit).stdout
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def journal(self, unit: str) -> str:
        """What a unit said in this boot, and what systemd said of it."""
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}").stdout

    def write(self, path: str, text: str) -> None:
        """Makes a file on the machine, with its folders."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def _is_listening(self, outer: subprocess.Popen[bytes]) -> bool:
        with suppress(OSError):
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            self._init = int(children[0]) if children else 0
        return bool(self._init) and (self.root / "run/systemd/private").is_socket()

    def _make_cgroup(self) -> Path:
        """A control group of its own (version 2), where this machine's are mounted, or mounted for it."""
        mounted = [folder for folder in (_CGROUPS, _CGROUPS / "unified") if (folder / "cgroup.procs").exists()]
        if not mounted:
            mounted = [self._folder / "cgroups"]
            mounted[0].mkdir(exist_ok=True)
            mount("-t", "cgroup2", "cgroup2", mounted[0])
        for left in mounted[0].glob("hsx-machine-*"):
            if not Path(f"/proc/{left.name.split('-')[2]}").exists():
                _removed(left)  # of tests that were killed
        group = mounted[0] / f"hsx-machine-{os.getpid()}-{self.boot_id[:8]}"
        group.mkdir()
        return group

    def _end(self, number: int) -> None:
        outer, self._outer = self._outer, None
        if outer is None:
            return
        with suppress(ProcessLookupError):
            if self._init:
                os.kill(self._init, number)
            else:
                outer.kill()
        try:
            outer.wait(60)
        except subprocess.TimeoutExpired:
            outer.kill()  # --kill-child takes process 1 with it
            outer.wait()
        self._init = 0
        group, self._cgroup = self._cgroup, None
        if group is not None:
            wait_until(lambda: _removed(group), f"{group} is empty")

    def close(self) -> None:
        """Ends it, however it stands. Idempotent."""
        self.cut_power()


@contextmanager
def started(folder: Path, binds: Mapping[str, Path], variables: Mapping[str, str] | None = None) -> Iterator[Machine]:
    """A running machine, whose disk is a tmpfs over `folder`; ended on leaving. Call it within `private_mounts`."""
    with tmpfs(folder, "mode=755,size=4g"):
        machine = Machine(folder, binds, variables or {})
        try:
            machine.boot()
            yield machine
        finally:
            machine.close()


def _removed(group: Path) -> bool:
    """Removes a control group with those below it; whether it is gone."""
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()
    return not group.exists()
