"""The whole pipeline against a model of what must be committed, through random faults, crashes and restarts.

A rule of the machine is a life of hsx (a process of its own, see `hsx.testing.lives`), or something that befalls the server or
the plan between two lives. Nothing but HTTP, the server's process and time is simulated: dumps, roots, ledger, writer threads,
locks and crashes are real. After each life the ledger is held against the one before; after the last, the store against states
computed from the ids alone.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hsx.model_config import read_model_shape
from hsx.stores.group import open_store
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.reader import Store
from hsx.stores.view import visible
from hsx.testing.lives import Life, read_server, write_server
from hsx.testing.simulated_faults import FAULTS, Planned
from hsx.testing.simulated_server import SimulatedServer
from hsx.testing.simulated_states import simulated_states
from hsx.testing.tiny_job import make_job

if TYPE_CHECKING:
    from hsx.records import CommittedRow
    from hsx.testing.lives import End, Lives

SAMPLES = 24
RETRIES = 2
MOST_LIVES = 12
"""That a job needs at its end, when nothing new goes wrong: each stop names a reason that a person mends."""
MENDED = frozenset({"restart_budget", "epoch_void", "staging_failed", "capture_off", "server_refused"})
"""Reasons to stop which a person answers by starting server and job again."""
MEMORY = Path("/dev/shm")
"""Where folders of jobs lie: nothing here is about disks, and one that is slow to sync would make the test slow."""


class World:
    """One job, its server, and the model: what is committed, and what may be quarantined.

    Args:
        lives: where hsx lives.
        restarts: whether hsx owns the server.
        seed: of the server's chances.
        blind: hsx proves nothing.
        watchdog: settings of the section of that name.
    """

    def __init__(self, lives: Lives, *, restarts: bool, seed: int, blind: bool = False, **watchdog: Any) -> None:
        self._lives = lives
        self._restarts = restarts
        self._blind = blind
        self.folder = Path(tempfile.mkdtemp(prefix="hsx-model-", dir=MEMORY if MEMORY.is_dir() else None))
        watchdog = {"violations": 4, "grace_s": 30.0, "canary_every": 5, **watchdog}
        pipeline = {"retries": RETRIES, "dump_deadline_s": 5.0, "commit_samples": 3}
        self.job = make_job(self.folder, SAMPLES, 60, status={"enabled": False}, watchdog=watchdog, pipeline=pipeline)
        self._server = self.folder / "server"
        loaded = self.job.loaded
        self.save(
            SimulatedServer(loaded.dump_dir, loaded.spec, read_model_shape(loaded.model), loaded.config.engine.port, seed)
        )
        self.committed: dict[int, tuple[CommittedRow, int]] = {}
        """As the last life left it: the ledger's row, and the sample's attempts."""
        self.revocations = 0
        self.ends: list[End] = []
        self.kills = 0
        self.strikes: list[tuple[str, int]] = []

    def close(self) -> None:
        """Removes all of it."""
        shutil.rmtree(self.folder)

    # --- what happens

    def load(self) -> SimulatedServer:
        """The server, between two lives."""
        return read_server(self._server)

    def save(self, server: SimulatedServer) -> None:
        """Puts it back."""
        write_server(self._server, server)

    def kill_server(self, how: str) -> None:
        """Somebody ends the server while hsx is away."""
        server = self.load()
        self.kills += server.alive
        server.kill(how)
        self.save(server)

    def live(self, dies_at: int | None = None, away_s: float = 0.0, pauses: list[tuple[int, float]] | None = None) -> End:
        """One life of hsx; checks that it broke no promise."""
        life = Life(
            str(self.job.loaded.path),
            str(self._server),
            self._restarts,
            dies_at=dies_at,
            away_s=away_s,
            pauses=pauses or [],
            blind=self._blind,
        )
        end = self._lives.live(life)
        self.ends.append(end)
        assert end.how in ("done", "died", "error"), f"{end.how}: {end.message}"
        assert end.how != "error" or end.kind in MENDED, f"the run ended with [{end.kind}] {end.message}"
        self._nothing_changed()
        return end

    def finish(self) -> None:
        """Lives until the job is done; what hsx may not mend, a person does."""
        for _ in range(MOST_LIVES):
            end = self.live()
            if end.how == "done":
                break
            self.kill_server("was ended by hand")
        else:
            pytest.fail(f"not done after {MOST_LIVES} lives: {[(end.how, end.kind, end.message) for end in self.ends]}")
        assert end.outcome["pending"] == 0
        assert not end.outcome["interrupted"]

    # --- what must be true

    def _nothing_changed(self) -> None:
        """What was committed is as it was, but for what a failed canary took back."""
        if not (self.job.loaded.state_dir / FILE_NAME).exists():
            return
        with self.job.ledger() as ledger:
            rows = {row.index: (row, ledger.sample(row.index).attempts) for row in ledger.committed()}
            revocations = ledger.revocations()
        revoked = {index for revocation in revocations[self.revocations :] for index in revocation.samples}
        self.revocations = len(revocations)
        changed = [i for i, row in self.committed.items() if i not in revoked and rows.get(i) != row]
        assert changed == [], f"committed samples that are not as they were: {changed}"
        self.committed = rows

    def wrong(self) -> list[int]:
        """Committed samples whose stored states are not those of their ids. Every shard is where the ledger says, and once."""
        loaded = self.job.loaded
        store, info = Store(loaded.store), open_store(loaded.store)
        shape = read_model_shape(loaded.model)
        shards = [(int(index), root) for root in info.roots for index in visible(info.folder(root))]
        expected = [(row.index, row.root) for row, _ in self.committed.values()]
        assert sorted(shards) == sorted(expected), "the shards on the roots are not those that the ledger knows"
        assert [int(index) for index in store.committed] == sorted(self.committed)
        wrong = []
        for index in self.committed:
            sample = store[index]
            truth = simulated_states(sample.input_ids_numpy, loaded.spec, shape.hidden_size)
            if not np.array_equal(sample.hidden_states_numpy, truth):
                wrong.append(index)
        return wrong

    def unexplained(self) -> dict[int, str]:
        """Quarantined samples whose reason no fault explains that did strike them."""
        strikes = self.load().strikes
        found = {}
        with self.job.ledger() as ledger:
            quarantined = list(ledger.quarantined())
        for row in quarantined:
            struck = [kind for kind, index in strikes if index == row.index]
            reasons = [reason for kind in struck for reason in FAULTS[kind]]
            enough = row.reason in ("request_refused", "server_killed") or len(struck) > RETRIES
            if row.reason not in reasons or not enough:
                found[row.index] = f"{row.reason} ({row.evidence}) after {struck}"
        return found

    def false_alarms(self) -> list[str]:
        """Failures held against samples, and verdicts against the server, that nothing which happened explains."""
        struck = set(self.load().strikes)
        kinds = {kind for kind, _ in struck}
        with self.job.ledger() as ledger:
            verdicts = {row.reason for row in ledger.epochs() if row.reason is not None}
        with closing(sqlite3.connect(self.job.loaded.state_dir / FILE_NAME)) as tables:
            failures = tables.execute("SELECT DISTINCT idx, reason FROM failures ORDER BY idx").fetchall()
        causes = {reason: {kind for kind, reasons in FAULTS.items() if reason in reasons} for reason in verdicts}
        causes |= {"sequence": {"reset", "gap", "twice"}, "advancing": {"hang"}}
        causes["alive"] = {"die", "killed"} if self.kills else {"die"}
        causes |= {name: {"corrupt"} for name in ("twins", "fingerprint", "canary")}
        kinds |= {"killed"} | ({"corrupt"} if self.load().corrupt else set())
        return [
            *(f"sample {i} failed by {why}" for i, why in failures if not any(why in FAULTS[k] for k, at in struck if at == i)),
            *(f"an epoch was voided for {why}" for why in sorted(verdicts) if not causes[why] & kinds),
        ]

    def judge(self) -> None:
        """The promise, for a job that is done: every sample is the truth, or is quarantined for a reason."""
        with self.job.ledger() as ledger:
            counts = ledger.counts()
        assert counts.committed + counts.quarantined == SAMPLES
        self.strikes = self.load().strikes
        assert self.wrong() == []
        assert self.unexplained() == {}
        assert self.false_alarms() == []


planned = st.builds(
    Planned,
    kind=st.sampled_from(sorted(FAULTS)),
    index=st.integers(0, SAMPLES - 1),
    count=st.sampled_from([1, 1, 1, 2, 3, 5]),
    value=st.sampled_from([0.5, 3.0, 20.0, 100.0]),
)
turns = st.one_of(st.integers(1, 60), st.integers(1, 400))
"""The first turns are those of the start; a life has some hundreds."""


class JobMachine(RuleBasedStateMachine):
    """Lives of hsx that end too early, and what befalls the server. The last life, in `teardown`, ends the job."""

    lives: Lives
    ended: ClassVar[list[World]]

    @initialize(
        restarts=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
        faults=st.lists(planned, max_size=10),
        poison=st.sets(st.integers(0, SAMPLES - 1), max_size=2),
        corrupt_after=st.none() | st.integers(0, 40),
        canary_every=st.sampled_from([0, 1, 3, 8]),
    )
    def begin(
        self,
        restarts: bool,
        seed: int,
        faults: list[Planned],
        poison: set[int],
        corrupt_after: int | None,
        canary_every: int,
    ) -> None:
        """A new job on a server that has its faults."""
        self.world = World(self.lives, restarts=restarts, seed=seed, canary_every=canary_every)
        self.restarts = restarts
        server = self.world.load()
        server.plan.faults, server.plan.poison, server.plan.corrupt_after = faults, poison, corrupt_after
        self.world.save(server)

    @rule(faults=st.lists(planned, min_size=1, max_size=6))
    def plan(self, faults: list[Planned]) -> None:
        """More will go wrong with some requests."""
        server = self.world.load()
        server.plan.faults += faults
        self.world.save(server)

    @rule(deaths=st.integers(1, 4))
    def sicken(self, deaths: int) -> None:
        """The next starts of the server fail."""
        server = self.world.load()
        server.plan.boot_deaths = deaths
        self.world.save(server)

    @rule(corrupt_after=st.integers(0, 20))
    def corrupt(self, corrupt_after: int) -> None:
        """The states will go wrong in a way that breaks no invariant of a sample."""
        server = self.world.load()
        server.plan.corrupt_after = corrupt_after
        self.world.save(server)

    @rule(
        dies_at=turns,
        away_s=st.sampled_from([0.0, 0.02, 1.0, 3600.0]),
        pauses=st.lists(st.tuples(turns, st.sampled_from([2.0, 60.0, 4000.0])), max_size=2),
    )
    def live(self, dies_at: int, away_s: float, pauses: list[tuple[int, float]]) -> None:
        """hsx is killed in the middle of something, and stopped for a while before that."""
        self.world.live(dies_at, away_s, pauses)

    @precondition(lambda self: not self.restarts)
    @rule()
    def kill(self) -> None:
        """The server dies while hsx is away."""
        self.world.kill_server("died while nobody looked")

    def teardown(self) -> None:
        """The job comes to its end, and is judged."""
        if not hasattr(self, "world"):
            return
        self.world.finish()
        self.world.judge()
        self.world.close()
        self.ended.append(self.world)


def explore(lives: Lives, examples: int, steps: int) -> list[World]:
    """Runs the machine, and returns the worlds that came to their end.

    A failing example is not shrunk: threads make it another one each time. Its folder stays, with the log of each life.
    """
    ended: list[World] = []
    machine = type("Machine", (JobMachine,), {"lives": lives, "ended": ended})
    phases = (Phase.explicit, Phase.generate)
    health = list(HealthCheck)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=steps, phases=phases, suppress_health_check=health),
    )
    return ended


def test_a_few_jobs_keep_every_promise(lives: Lives) -> None:
    assert len(explore(lives, 3, 4)) >= 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_jobs_keep_every_promise(lives: Lives) -> None:
    worlds = explore(lives, 70, 8)
    ends = Counter(end.how for world in worlds for end in world.ends)
    # A model that nothing happens to proves nothing.
    assert len(worlds) >= 60
    assert ends["died"] >= 60
    assert len({kind for world in worlds for kind, _ in world.strikes}) >= len(FAULTS) - 4
    assert sum(world.revocations for world in worlds) >= 1


@pytest.mark.parametrize("canary_every", [0, 4])
@pytest.mark.parametrize("corrupt_after", [2, 9])
def test_states_that_go_wrong_unseen_are_taken_back(lives: Lives, corrupt_after: int, canary_every: int) -> None:
    world = World(lives, restarts=True, seed=corrupt_after, canary_every=canary_every)
    server = world.load()
    server.plan.corrupt_after = corrupt_after
    world.save(server)
    world.finish()
    world.judge()
    assert len(world.load().corrupt) == 1
    assert world.revocations == 1
    world.close()


@pytest.mark.parametrize("death", [12, 15])
def test_what_a_dead_server_had_spoilt_unseen_is_taken_back_by_the_next_one(lives: Lives, death: int) -> None:
    world = World(lives, restarts=True, seed=death, canary_every=0)
    server = world.load()
    server.plan.corrupt_after = 2
    server.plan.faults.append(Planned("die", death))
    world.save(server)
    world.finish()
    world.judge()
    assert world.revocations == 1
    world.close()


def test_the_model_can_fail(lives: Lives) -> None:
    """With nothing measured in the dumps, the states of others are stored: the model must see it."""
    world = World(lives, restarts=True, seed=1, blind=True)
    server = world.load()
    server.plan.faults += [Planned("other_sample", 3), Planned("late_rows", 7), Planned("nan", 9), Planned("swapped", 5)]
    world.save(server)
    world.finish()
    assert set(world.wrong()) >= {3, 5, 7, 9}
    with pytest.raises(AssertionError):
        world.judge()
    world.close()
