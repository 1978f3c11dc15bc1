"""kill -9 at each step of a move: nothing is lost at that moment, and whoever comes next puts it in order.

The steps are those of `hsx.move.Step`, each the first and the second time that it is reached.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING, get_args

import pytest

from hsx.move import Step
from hsx.stores.attach import attach_roots
from hsx.stores.ledger import SqliteLedger
from hsx.stores.root import discard_strays
from hsx.stores.view import UnionView

if TYPE_CHECKING:
    from hsx.testing.moving import MoveBench

PROGRAM = """
import os, signal, sys
from pathlib import Path
from hsx.testing.moving import MoveBench

bench = MoveBench(Path(sys.argv[1]), new=False)
times = 0

def reached(step):
    global times
    times += step == sys.argv[2]
    if times == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

bench.move("a", reached=reached)
"""
MOMENTS = [(step, times) for step in get_args(Step) for times in (1, 2)]


def kill_at(bench: MoveBench, step: str, times: int) -> None:
    """Has a move of root a killed as it has taken a step for the `times`-th time."""
    command = [sys.executable, "-c", PROGRAM, str(bench.folder), step, str(times)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def start_of_a_run(bench: MoveBench) -> None:
    """What `hsx run` does with roots and view before anything else."""
    info, roots = attach_roots(bench.info, bench.places)
    for root in roots:
        root.sweep()
    ledger = SqliteLedger(bench.ledger_path)
    view = UnionView(info)
    view.repair(ledger.committed_roots())
    discard_strays(roots, ledger.committed_roots(), info.layout.samples, ledger.revoked())


@pytest.mark.parametrize(("step", "times"), MOMENTS)
def test_the_same_command_goes_on(bench: MoveBench, step: str, times: int) -> None:
    kill_at(bench, step, times)
    bench.nothing_lost()
    bench.move("a")
    bench.in_order()
    assert "a" not in bench.homes_now().values()


@pytest.mark.parametrize("step", get_args(Step))
def test_a_run_that_starts_puts_it_in_order(bench: MoveBench, step: str) -> None:
    kill_at(bench, step, 1)
    start_of_a_run(bench)
    bench.in_order()


@pytest.mark.parametrize("step", ["named", "shown", "switched", "committed"])
def test_a_move_that_is_stopped_at_once_has_cleared_up(bench: MoveBench, step: str) -> None:
    kill_at(bench, step, 1)
    assert bench.move("a", stopped=lambda: True).stopped
    bench.in_order()


@pytest.mark.parametrize("step", ["shown", "committed"])
def test_a_move_to_another_root_goes_on_as_well(bench: MoveBench, step: str) -> None:
    kill_at(bench, step, 1)
    bench.move("a", ["c"])
    bench.move("c", ["b"])
    bench.in_order()
    assert set(bench.homes_now().values()) == {"b"}
