"""Lives of hsx: each runs a job on a simulated server in a process of its own, to its end or to the moment of its death.

A death is a real one (`os._exit`, with threads at work and locks held), at a chosen turn of the event loop. A life
takes no more than virtual time allows, and leaves the server to the next one. Processes are forked off one that has everything
imported, so a life costs no start.

    python -m hsx.testing.lives       answers requests on stdin, one JSON object a line, with one on stdout
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from hsx.app import Outcome, run_job
from hsx.config_load import load
from hsx.core.invariants import Content
from hsx.errors import RunError
from hsx.logs import configure
from hsx.model_config import read_model_shape
from hsx.testing.simulated_engine import SimulatedClient, SimulatedOwner, Wire
from hsx.testing.simulated_server import SimulatedServer
from hsx.testing.virtual_time import VirtualClock, VirtualTimeLoop
from hsx.wiring import Outside

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray


DIED: Final = 77
LONGEST_S: Final = 7 * 86400.0
MOST_STEPS: Final = 300_000
"""What no life of a small job needs: beyond it the run is said to be stuck."""
LONGEST_PROMPT: Final = 1000


@dataclass(frozen=True, slots=True)
class Life:
    """How one life of hsx goes.

    Attributes:
        job: the job file.
        server: the pickled `SimulatedServer`, read at birth and written at death.
        restarts: hsx owns the server: a new one at birth, and none left after death.
        dies_at: turn of the event loop at which hsx dies; None for a natural end.
        away_s: how long nobody was there before, while the server went on.
        pauses: (turn, seconds): hsx stands still for so long, while the server goes on.
        blind: nothing is measured in the dumps: they are all taken for sound.
    """

    job: str
    server: str
    restarts: bool
    dies_at: int | None = None
    away_s: float = 0.0
    pauses: list[tuple[int, float]] = field(default_factory=list)
    blind: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """How it ended.

    Attributes:
        how: `done`, `died`, `error` (RunError), `stuck` or `broken` (any other exception).
        kind: of a RunError.
        message: its message, or the traceback.
        steps: turns of the event loop.
        seconds: virtual seconds.
        outcome: the fields of `hsx.app.Outcome` of one that was done.
    """

    how: str
    kind: str = ""
    message: str = ""
    steps: int = 0
    seconds: float = 0.0
    outcome: dict[str, Any] = field(default_factory=dict)


def read_server(path: Path) -> SimulatedServer:
    """The server that a life left."""
    server = pickle.loads(path.read_bytes())  # noqa: S301 - written by these tests themselves
    assert isinstance(server, SimulatedServer)
    return server


def write_server(path: Path, server: SimulatedServer) -> None:
    """Puts a server where the next life finds it."""
    path.write_bytes(pickle.dumps(server))


def sees_nothing(
    states: NDArray[np.uint16], input_ids: NDArray[np.int32], expected_ids: NDArray[np.int32], chunk_tokens: int
) -> Content:
    """A measure that finds every dump sound, whatever it holds: with it, the invariants prove nothing."""
    return Content(
        ids_differ_at=None,
        ids_all_equal=False,
        nonfinite=0,
        nonfinite_at=None,
        zero_rows=0,
        zero_row_at=None,
        equal_states=(),
        constant_states=(),
    )


def live(life: Life) -> End:
    """Lives, in this process; does not return from a death."""
    loaded = load(Path(life.job))
    server = read_server(Path(life.server))
    # The last life may have ended in the middle of anything: its connections are cut, and its own server dies with it.
    server.hang_up()
    if life.restarts:
        server.kill("was ended with hsx")
    server.advance(server.now + life.away_s)
    server.outcomes.clear()
    pauses = dict(life.pauses)
    wires: list[Wire] = []

    def on_step() -> None:
        if loop.steps == life.dies_at:
            write_server(Path(life.server), server)
            os._exit(DIED)
        if loop.steps in pauses and wires:
            loop.stand_still(pauses[loop.steps])
            wires[0].keep_up()  # the server was not stopped; all it did meanwhile was done before hsx looks again
        if loop.steps > MOST_STEPS or loop.time() > LONGEST_S:
            raise StuckError

    async def run() -> Outcome:
        wire = Wire(server)
        wires.append(wire)
        outside = Outside(
            client=SimulatedClient(wire, read_model_shape(loaded.model), LONGEST_PROMPT),
            owner=SimulatedOwner(wire, restarts=life.restarts),
            clock=VirtualClock(),
        )
        if life.blind:
            outside = Outside(client=outside.client, owner=outside.owner, clock=outside.clock, measure=sees_nothing)
        return await run_job(loaded, outside=outside)

    loop = VirtualTimeLoop(on_step)
    asyncio.set_event_loop(loop)
    try:
        outcome = loop.run_until_complete(run())
    except RunError as error:
        end = End("error", error.kind, error.message, loop.steps, loop.time())
    except StuckError:
        tasks = "\n".join(repr(task) for task in asyncio.all_tasks(loop))
        end = End("stuck", "", tasks, loop.steps, loop.time())
    except BaseException:  # noqa: BLE001 - whatever it is, the test is told
        end = End("broken", "", traceback.format_exc(), loop.steps, loop.time())
    else:
        end = End("done", "", "", loop.steps, loop.time(), asdict(outcome))
    write_server(Path(life.server), server)
    return end


class StuckError(Exception):
    """The run went on beyond all measure."""


class Lives:
    """Starts lives, one at a time; a context manager. Needs no event loop."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "hsx.testing.lives"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._parent.communicate()  # the end of its input ends it

    def live(self, life: Life) -> End:
        """One life, whole. What it logs goes to `<job file>.log`, one JSON object a line."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(asdict(life)) + "\n")
        self._parent.stdin.flush()
        return End(**json.loads(self._parent.stdout.readline()))


def main() -> None:
    """Serves stdin until its end."""
    for line in sys.stdin:
        life = Life(**json.loads(line))
        report = Path(f"{life.job}.end")
        report.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            status = 1
            with suppress(BaseException):
                log = os.open(f"{life.job}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                for descriptor in (1, 2):
                    os.dup2(log, descriptor)
                configure("debug", "json", sys.stdout)
                report.write_text(json.dumps(asdict(live(life))))
                status = 0
            # Nothing of the parent's is cleaned up here.
            os._exit(status)
        _, status = os.waitpid(child, 0)
        if report.exists():
            end = json.loads(report.read_text())
        elif os.waitstatus_to_exitcode(status) == DIED:
            end = asdict(End("died"))
        else:
            end = asdict(End("broken", "", f"the process ended with wait status {status}"))
        sys.stdout.write(json.dumps(end) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
