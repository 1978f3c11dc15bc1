"""A life of hsx on the simulated server: it ends as it was told to, and leaves the server to the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.model_config import read_model_shape
from hsx.testing.lives import Life, Lives, read_server, write_server
from hsx.testing.simulated_faults import Planned
from hsx.testing.simulated_server import SimulatedServer
from hsx.testing.tiny_job import TinyJob, make_job

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 6


@pytest.fixture
def job(tmp_path: Path) -> TinyJob:
    return make_job(tmp_path, SAMPLES, 40, status={"enabled": False})


@pytest.fixture
def server(job: TinyJob) -> Path:
    """The file of a server that was not started yet."""
    file, loaded = job.folder / "server", job.loaded
    shape, port = read_model_shape(loaded.model), loaded.config.engine.port
    write_server(file, SimulatedServer(loaded.dump_dir, loaded.spec, shape, port, seed=7))
    return file


def committed(job: TinyJob) -> int:
    with job.ledger() as ledger:
        return ledger.counts().committed


def test_a_life_may_end_by_itself(lives: Lives, job: TinyJob, server: Path) -> None:
    end = lives.live(Life(str(job.loaded.path), str(server), restarts=True))
    assert (end.how, end.outcome["committed"], end.outcome["restarts"]) == ("done", SAMPLES, 0)
    assert end.seconds > 20.0, "virtual seconds, most of which the server takes to start"
    left = read_server(server)
    assert (left.alive, left.death) == (False, "server was stopped")


@pytest.mark.parametrize("restarts", [True, False])
def test_a_death_leaves_no_lock_and_the_server_only_where_it_is_not_owned(
    lives: Lives, job: TinyJob, server: Path, restarts: bool
) -> None:
    # As many turns as it takes for prompts to be at the server, and for none to be committed.
    end, turn = lives.live(Life(str(job.loaded.path), str(server), restarts, dies_at=10)), 10
    while not read_server(server).in_flight:
        assert end.how == "died"
        turn += 5
        end = lives.live(Life(str(job.loaded.path), str(server), restarts, dies_at=turn))
    assert end.how == "died"
    before = read_server(server).record
    assert before is not None
    end = lives.live(Life(str(job.loaded.path), str(server), restarts, away_s=1.0))
    assert (end.how, committed(job)) == ("done", SAMPLES)
    after = read_server(server).record
    assert after is not None
    assert (after.epoch == before.epoch) == (not restarts)


def test_a_pause_of_hsx_is_none_of_the_server(lives: Lives, job: TinyJob, server: Path) -> None:
    pauses = [(turn, 10_000.0) for turn in range(20, 200, 20)]
    end = lives.live(Life(str(job.loaded.path), str(server), restarts=True, pauses=pauses))
    assert (end.how, end.outcome["committed"], end.outcome["restarts"], end.outcome["violations"]) == ("done", SAMPLES, 0, {})
    assert end.seconds > 20_000.0


def test_a_run_that_goes_wrong_says_how(lives: Lives, job: TinyJob, server: Path) -> None:
    dead = read_server(server)
    dead.plan.boot_deaths = 1000
    write_server(server, dead)
    end = lives.live(Life(str(job.loaded.path), str(server), restarts=True))
    assert (end.how, end.kind) == ("error", "restart_budget")
    assert "died at its start, as planned" in end.message
    end = lives.live(Life(str(job.folder / "nowhere.toml"), str(server), restarts=True))
    assert end.how == "broken"


def test_without_measuring_whatever_comes_is_stored(lives: Lives, job: TinyJob, server: Path) -> None:
    lying = read_server(server)
    lying.plan.faults.append(Planned("other_sample", 2))
    write_server(server, lying)
    end = lives.live(Life(str(job.loaded.path), str(server), restarts=True, blind=True))
    assert (end.how, end.outcome["committed"], end.outcome["violations"]) == ("done", SAMPLES, {})


def test_a_server_that_dies_while_prompts_wait_for_room_leaves_room_for_the_next_ones_canary(
    lives: Lives, tmp_path: Path
) -> None:
    """The intake waits behind dumps that could not be written; it must not hold a place while there is no server."""
    job = make_job(tmp_path, 2 * SAMPLES, 40, status={"enabled": False}, pipeline={"concurrency": 3})
    shape, port = read_model_shape(job.loaded.model), job.loaded.config.engine.port
    simulated = SimulatedServer(job.loaded.dump_dir, job.loaded.spec, shape, port, seed=7)
    simulated.plan.faults += [Planned("no_space", index) for index in range(2 * SAMPLES)]
    simulated.plan.faults += [Planned("die", index) for index in range(2 * SAMPLES)]
    write_server(tmp_path / "server", simulated)
    end = lives.live(Life(str(job.loaded.path), str(tmp_path / "server"), restarts=True))
    assert (end.how, end.kind) in (("done", ""), ("error", "restart_budget")), end.message
