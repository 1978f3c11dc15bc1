"""A job in its units on a machine of `hsx.testing.systemd_machine`, as `hsx install-units` has written them."""

from __future__ import annotations

import json
import random
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import hsx
from hsx.commands.toml_text import to_toml
from hsx.testing.commands import PATIENCE_S, wait_until
from hsx.testing.servers import TINY, free_port

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hsx.testing.systemd_machine import Machine

PYTHON: Final = "/opt/hsx/bin/python"
SOURCE: Final = "/opt/source"
VARIABLES: Final = {
    "PYTHONDONTWRITEBYTECODE": "1",
    # Where a Python names its own library by a path that the machine does not have.
    "LD_LIBRARY_PATH": "/opt/hsx.base/lib:/opt/sglang.base/lib",
}
"""Environment variables of all units of a machine that has lent environments."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment of this machine, and where the machine has one of the same packages, with this very hsx.

    Its files are lent, as they may lie where units see nothing: below /root, /home or /tmp.

    Attributes:
        prefix: the environment here.
        place: its folder there, such as `/opt/hsx`.
    """

    prefix: Path
    place: str

    def binds(self) -> dict[str, Path]:
        """What the machine has to see of this one: packages, the Python below them, and hsx."""
        return {
            f"{self.place}.packages": self._packages(),
            f"{self.place}.base": self._interpreter().parents[1],
            f"{SOURCE}/hsx": Path(hsx.__file__).parent,
        }

    def make(self, machine: Machine) -> None:
        """Makes the environment on the machine."""
        interpreter = self._interpreter()
        machine.write(f"{self.place}/pyvenv.cfg", f"home = {self.place}.base/bin\ninclude-system-site-packages = false\n")
        packages = f"{self.place}/lib/{self._packages().parent.name}/site-packages"
        # As a site folder: packages there may have lines of their own to be run at each start.
        machine.write(f"{packages}/lent.pth", f"{SOURCE}\nimport site; site.addsitedir('{self.place}.packages')\n")
        machine.run("mkdir", "-p", f"{self.place}/bin")
        machine.run("ln", "-sfn", f"{self.place}.base/bin/{interpreter.name}", f"{self.place}/bin/python")

    def _interpreter(self) -> Path:
        return (self.prefix / "bin" / "python").resolve()

    def _packages(self) -> Path:
        (folder,) = self.prefix.glob("lib/python3*/site-packages")
        return folder


OWN: Final = Environment(Path(sys.prefix), "/opt/hsx")
"""The environment that runs the tests."""


@dataclass(frozen=True, slots=True)
class UnitJob:
    """A job whose units are installed and not started.

    Attributes:
        machine: where.
        name: instance of its units.
        port: the server's port.
        status_port: the status endpoint's port; the machine shares this one's network.
    """

    machine: Machine
    name: str
    port: int
    status_port: int

    @property
    def unit(self) -> str:
        """The unit of hsx."""
        return f"hsx@{self.name}.service"

    @property
    def server(self) -> str:
        """The unit of the server."""
        return f"hsx-sglang@{self.name}.service"

    @property
    def path(self) -> str:
        """The job file."""
        return f"/etc/hsx/{self.name}.toml"

    def start(self) -> None:
        """Starts hsx, and its server with it; returns once it is ready."""
        self.machine.systemctl("start", self.unit)

    def drop_in(self, unit: str, text: str) -> None:
        """Adds settings to a unit's [Service] section."""
        self.machine.write(f"/etc/systemd/system/{unit}.d/90-test.conf", f"[Service]\n{text}")
        self.machine.systemctl("daemon-reload")

    def hsx(self, *words: str, check: bool = True) -> tuple[int, str]:
        """`hsx WORDS... JOB` as the units' user: exit code, and what it said."""
        command, *rest = words
        done = self.machine.run(PYTHON, "-m", "hsx", command, self.path, *rest, user="hsx", check=check, timeout_s=300)
        return done.returncode, done.stdout + done.stderr

    def is_active(self) -> bool:
        """Whether hsx runs and is ready."""
        return self.machine.show(self.unit, "ActiveState")["ActiveState"] == "active"

    def pid(self, unit: str = "") -> int:
        """Main process, as the machine numbers it; 0 where there is none."""
        return int(self.machine.show(unit or self.unit, "MainPID")["MainPID"])

    def status(self) -> dict[str, Any]:
        """The status document; {} where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.status_port}/status", timeout=30) as answer:
                document: dict[str, Any] = json.loads(answer.read())
                return document
        except (urllib.error.URLError, OSError):
            return {}

    def epoch(self) -> str:
        """The current epoch; "" while there is none."""
        epoch = self.status().get("engine", {}).get("epoch") or {}
        return str(epoch.get("id") or "")

    def committed(self) -> int:
        """Samples committed in the job, as the status document has it; -1 where there is none."""
        samples = self.status().get("progress", {}).get("samples", {})
        return int(samples.get("committed", -1))

    def fault(self, kind: str, count: int = 1, match: str = "", value: float | None = None) -> None:
        """Arms a fault of the reference engine, see `hsx.testing.faults`."""
        self._post("POST", "/_fault", {"kind": kind, "count": count, "match": match, "value": value})

    def clear_faults(self) -> None:
        """Disarms them all."""
        self._post("DELETE", "/_fault?kind=", None)

    def is_done(self) -> bool:
        """Whether hsx has ended in good order."""
        return self._state() == "inactive"

    def wait_done(self, patience_s: float = 300.0) -> None:
        """Waits until hsx has ended by itself; raises AssertionError where it failed."""
        wait_until(lambda: self._state() in ("inactive", "failed"), f"{self.unit} ends", patience_s)
        assert self._state() == "inactive", self.machine.journal(self.unit)[-4000:]

    def assert_complete(self, samples: int) -> None:
        """Every sample is stored, and proved by reading it again."""
        code, text = self.hsx("verify", "--json", "--no-cold", check=False)
        assert code == 0, text
        assert json.loads(text)["read"] == samples, text

    def _state(self) -> str:
        return self.machine.show(self.unit, "ActiveState")["ActiveState"]

    def _post(self, method: str, path: str, body: Mapping[str, object] | None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, method=method, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S):  # noqa: S310 - http, as written above
            pass


def install(machine: Machine, name: str, samples: int = 40, **changes: Mapping[str, Any]) -> UnitJob:
    """Writes a job over two roots to `/etc/hsx`, has its units written, and does what `hsx install-units` says is next.

    Args:
        machine: a running one, with `binds` and `VARIABLES`.
        name: name of the job, and instance of its units.
        samples: how many random prompts of 1 to 90 tokens.
        changes: by section of the job file, keys to set.
    """
    place, port, status_port = f"/srv/hsx/{name}", free_port(), free_port()
    roots = [f"/mnt/{name}-{root}" for root in ("a", "b")]
    document: dict[str, Any] = {
        "job": {"name": name, "store": f"{place}/store.zarr"},
        "model": {"path": "/srv/models/tiny"},
        "dataset": {"path": f"/srv/data/{name}.jsonl"},
        "capture": {"layers": [1, 3]},
        "staging": {"dump_dir": f"/srv/dumps/{name}", "max_bytes": "64MiB"},
        "engine": {
            "kind": "reference",
            "ownership": "systemd",
            "port": port,
            "start_timeout_s": 120.0,
            "args": ["--allow-faults", "--chunked-prefill-size", "32"],
        },
        "pipeline": {"concurrency": 8, "start_rate": 5000.0, "commit_seconds": 0.02, "dump_deadline_s": 30.0},
        # A server that tests hold is not to be taken for one that hangs.
        "watchdog": {"grace_s": 600.0, "backoff_first_s": 0.05, "backoff_longest_s": 0.1},
        "status": {"port": status_port},
    }
    for section, values in changes.items():
        document[section] = {**document.get(section, {}), **values}
    document["roots"] = [{"name": Path(root).name, "path": root, "reserve": "0B"} for root in roots]
    rng = random.Random(samples)
    rows = [{"id": f"s{i}", "input_ids": rng.choices(range(500), k=rng.randint(1, 90))} for i in range(samples)]
    if document["model"]["path"] == "/srv/models/tiny":
        machine.write("/srv/models/tiny/config.json", json.dumps({"model_type": "llama", **TINY}))
    machine.write(f"/srv/data/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    machine.write(f"/etc/hsx/{name}.toml", to_toml(document))
    for root in roots:
        machine.run("mkdir", "-p", root)
    said = json.loads(machine.run(PYTHON, "-m", "hsx", "install-units", f"/etc/hsx/{name}.toml", "--json").stdout)
    for step in said["next"]:
        if " start " not in step:
            machine.run(*step.split())
    machine.run("chown", "hsx:hsx", *roots)
    return UnitJob(machine, name, port, status_port)
