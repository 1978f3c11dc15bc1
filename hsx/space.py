"""Room for what is under way: on the roots, and in the dump directory. Both are promised to a sample before it is asked for.

So no disk is filled to the brim, and what was extracted always has a place to go. Where there is no room the intake pauses: the
observer hears why and what to free, the disks are looked at every few seconds, and it goes on by itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

from hsx.core.amounts import in_words
from hsx.core.placement import RootSpace, Shares, Speed
from hsx.errors import EngineError, RunError
from hsx.root_looks import RootLooks
from hsx.tasks import first

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hsx.core.admission import InFlight
    from hsx.ports import Clock, Observer, Root

POLL_S: Final = 2.0
"""How long between two looks at disks that have no room."""
REFUSED_S: Final = 30.0
"""A root that answers ENOSPC against its own word (a quota, no inodes) is left alone for so long, or until it has room for one
more shard."""
FREED_BYTES: Final = 1 << 20
"""More room than before, where a sync or a name found none: less comes and goes with every copy of the ledger."""
PATIENCE_S: Final = 5.0
"""A root that does not say for so long how much room it has takes nothing new until it does: its mount hangs."""
SLACK_BYTES: Final = 1 << 16
"""Room in the dump directory for what is no dump: records, and the reasons of failures."""


@dataclass(slots=True, eq=False)
class Booking:
    """Room for one shard on one root.

    Attributes:
        size: bytes of the shard file, or the most that it may have.
        root: where; "" while nothing is promised, before it was placed and after it was released.
    """

    size: int
    root: str = ""


@dataclass(frozen=True, slots=True)
class RootsSettings:
    """What is known of the roots beyond the port.

    Attributes:
        reserves: bytes that stay free, by root; 0 for those not named.
        disks: number of the file system, by root: roots that share one share its room. Those not named have one of their own.
        needed: bytes that the rest of the job takes at most, for people; None where nobody knows.
        draining: whether a root is being emptied and takes nothing new. Blocks briefly.
        patience_s: how long a root may take to answer.
    """

    reserves: Mapping[str, int] = field(default_factory=dict)
    disks: Mapping[str, int] = field(default_factory=dict)
    needed: Callable[[], int | None] = lambda: None
    draining: Callable[[str], bool] = lambda _: False
    patience_s: float = PATIENCE_S


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A root that had no room when it was tried, against its own word."""

    at: float
    free: int
    wanted: int
    message: str


class Space:
    """The roots' room, and which of them are in service.

    Args:
        roots: the disks.
        settings: see there.
        clock: for the pause between two looks, and for how long a refusal counts.
        observer: hears of roots that are lost, of their room, and of pauses.
    """

    def __init__(self, roots: Sequence[Root], settings: RootsSettings, clock: Clock, observer: Observer) -> None:
        self._roots = {root.name: root for root in roots}
        self._settings = settings
        self._clock = clock
        self._observer = observer
        self._shares = Shares()
        self._speeds = {name: Speed() for name in self._roots}
        self._booked = dict.fromkeys(self._roots, 0)
        self._refusals: dict[str, _Refusal] = {}
        self._draining: set[str] = set()
        self._looks = RootLooks(self._roots, self._look, settings.patience_s)
        self._silent: set[str] = set()
        self._looking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._waiting = 0
        self._drained = False
        self.lost: dict[str, RunError] = {}
        """Roots out of service for the rest of the run, each with what it answered."""

    # --- bookings

    async def book(self, size: int) -> Booking:
        """Waits until a root has room for a shard of `size` bytes, and promises it. Cancelling promises nothing.

        Raises as `place`.
        """
        booking = Booking(size)
        await self.place(booking)
        return booking

    async def place(self, booking: Booking) -> None:
        """Gives a booking a root that takes it, unless it has one; waits while none has room.

        Raises:
            RunError: `root_unusable` when every root is out of service.
            EngineError: `roots_full` in a drained run: nobody waits any more.
        """
        if booking.root and not self._shuns(booking.root):
            return
        self.release(booking)
        changed = self._changed
        obstacle = await self._try(booking)
        if obstacle is None:
            return
        self._waiting += 1
        stirred = any(self._booked.values())  # what is promised may come back at any moment: nobody is called yet
        try:
            while obstacle is not None:
                if self._drained:
                    raise EngineError("roots_full", obstacle)
                if not stirred:
                    self._observer.intake_paused("roots_full", obstacle)
                stirred = await first(changed.wait(), self._pause())
                changed = self._changed
                obstacle = await self._try(booking)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._observer.intake_resumed("roots_full")

    async def _pause(self) -> bool:
        await self._clock.sleep(POLL_S)
        return False

    def _shuns(self, name: str) -> bool:
        return name in self.lost or name in self._silent or name in self._draining or name in self._refusals

    def release(self, booking: Booking) -> None:
        """The shard is on its disk, or will not be written: its room is not promised any more. Idempotent."""
        if booking.root:
            self._booked[booking.root] -= booking.size
            booking.root = ""
            self._stir()

    def drain(self) -> None:
        """Nobody waits for room any more."""
        self._drained = True
        self._stir()

    def shutdown(self) -> None:
        """Ends the threads that look; none is waited for, as its mount may hang."""
        self._looks.shutdown()

    def _stir(self) -> None:
        """Lets everybody who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- what the writers found

    def wrote(self, name: str, nbytes: int, seconds: float) -> None:
        """A writer took `seconds` for a shard of `nbytes` on a root, which has room after all if it had said otherwise."""
        self._speeds[name].wrote(nbytes, seconds)
        self._refusals.pop(name, None)

    def failed(self, name: str, error: RunError, wanted: int = FREED_BYTES) -> None:
        """A root answered with an error. For want of room it is left alone for a while; otherwise it is out of service.

        Args:
            name: the root.
            error: what it answered.
            wanted: bytes that it had no room for: with so many more free than now it is tried again before that while is over.
        """
        if name in self.lost:
            return
        if error.kind != "roots_full":
            self.lost[name] = error
            self._observer.root_lost(name, error.kind, error.message)
        elif name not in self._refusals:
            self._refusals[name] = _Refusal(self._clock.monotonic(), -1, wanted, error.message)
            self._observer.error_met(error.kind, error.message)
        self._stir()

    # --- looking

    async def _try(self, booking: Booking) -> str | None:
        """Looks at the disks and books one; or says, for people, why none can take it. Raises RunError when all are lost."""
        async with self._looking:
            # Taken before the disks are read: what is written meanwhile counts twice, and never not at all.
            pending = dict(self._booked)
            found = await self._looks.ask(name for name in self._roots if name not in self.lost)
            self._tell_silent()
            spaces = self._spaces(pending, found)
            chosen = self._shares.choose(spaces, booking.size)
            if chosen is not None:
                booking.root = chosen
                self._booked[chosen] += booking.size
                return None
        if len(self.lost) == len(self._roots):
            reasons = "".join(f"\n  {name}: {error.message}" for name, error in self.lost.items())
            raise RunError("root_unusable", f"every root is out of service{reasons}")
        return self._obstacle(spaces, booking.size)

    def _look(self, name: str) -> tuple[int | RunError, bool]:
        """Free bytes of a root, or what it answered instead, and whether it is being emptied. Blocks."""
        try:
            return (self._roots[name].free(), self._settings.draining(name))
        except RunError as error:
            return (error, False)
        except OSError as error:
            return (RunError("root_unusable", f"root {name} cannot be looked at: {error.strerror}"), False)

    def _tell_silent(self) -> None:
        """Tells which roots do not answer, and which do again."""
        silent = {name for name in self._looks.silent if name not in self.lost}
        for name in sorted(silent - self._silent):
            self._observer.root_silent(name, self._settings.patience_s)
        for name in sorted(self._silent - silent - self.lost.keys()):
            self._observer.root_answered(name)
        self._silent = silent

    def _spaces(self, pending: dict[str, int], found: dict[str, tuple[int | RunError, bool]]) -> list[RootSpace]:
        spaces = []
        for name in self._roots:
            silent = name in self._silent
            free, draining = found.get(name, (0, False))
            if isinstance(free, RunError):
                self.failed(name, RunError("root_unusable", free.message))
                free = 0
            if not silent:
                (self._draining.add if draining else self._draining.discard)(name)
            refused = name not in self.lost and not silent and self._refuses(name, free)
            beside = [other for other in self._roots if self._disk(other) == self._disk(name)]
            space = RootSpace(
                name,
                free,
                reserve=max(self._settings.reserves.get(other, 0) for other in beside),
                pending=sum(pending[other] for other in beside),
                usable=name not in self.lost and not silent and not draining and not refused,
                speed=self._speeds[name].bytes_per_s,
            )
            spaces.append(space)
            if silent:
                continue  # what was seen of it last stays the best that is known
            state = "lost" if name in self.lost else "draining" if draining else "refusing" if refused else "in_service"
            self._observer.root_space(name, free, room=space.room, booked=self._booked[name], speed=space.speed, state=state)
        return spaces

    def _disk(self, name: str) -> int | str:
        return self._settings.disks.get(name, name)

    def _refuses(self, name: str, free: int) -> bool:
        """Whether a root that answered ENOSPC is still left alone."""
        refusal = self._refusals.get(name)
        if refusal is None:
            return False
        if refusal.free < 0:  # the first look since
            self._refusals[name] = replace(refusal, free=free)
        elif free >= refusal.free + refusal.wanted or self._clock.monotonic() - refusal.at >= REFUSED_S:
            del self._refusals[name]
            return False
        return True

    def _obstacle(self, spaces: Sequence[RootSpace], size: int) -> str:
        """Why there is no room, and what to free, for people."""
        parts, wanted = [], []
        for space in spaces:
            if space.name in self.lost:
                parts.append(f"{space.name} is out of service")
            elif space.name in self._silent:
                parts.append(f"{space.name} does not answer")
            elif space.name in self._draining:
                parts.append(f"{space.name} is being emptied")
            elif space.name in self._refusals and space.free - space.reserve - space.pending >= size:
                parts.append(f"{space.name} answers ENOSPC with {in_words(space.free)} free: a quota, or no inodes")
            else:
                parts.append(f"{space.name} has {in_words(space.free)} free, {in_words(space.reserve)} of it reserved")
                wanted.append((size - (space.free - space.reserve - space.pending), space.name))
        free = ""
        if wanted:
            missing, name = min(wanted)
            free = f"free at least {in_words(missing)} on root {name}"
            needed = self._settings.needed()
            if needed:
                free += f" (the rest of the job needs up to {in_words(needed)})"
            free += ": "
        return f"{free}no root has room for a shard of {in_words(size)}: {'; '.join(parts)}"


class DumpRoom(Protocol):
    """What is asked of the dump directory; see `hsx.ports.Dumps`."""

    def free(self) -> int:
        """Free bytes of its file system."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes that each dump takes there, by name."""
        ...


class Staging:
    """The dump directory's room: other users of its tmpfs may fill it, whatever the budget says.

    Args:
        dumps: the dump directory.
        ours: whether a dump of this name is one whose room was promised here.
        clock: for the pause between two looks.
        observer: hears of pauses.
    """

    def __init__(self, dumps: DumpRoom, ours: Callable[[str], bool], clock: Clock, observer: Observer) -> None:
        self._dumps = dumps
        self._ours = ours
        self._clock = clock
        self._observer = observer
        self._refusal = ""
        self._waiting = 0
        self._drained = False

    async def admit(self, now: InFlight, nbytes: int) -> bool:
        """Waits until a dump of `nbytes` has room beside those that are promised. True where it paused for that.

        Args:
            now: what is in flight; read again at each look.
            nbytes: size of the dump.

        Raises EngineError `staging_full` in a drained run.
        """
        obstacle = await self._obstacle(now, nbytes)
        if obstacle is None:
            return False
        self._waiting += 1
        try:
            while obstacle is not None:
                if self._drained:
                    raise EngineError("staging_full", obstacle)
                self._observer.intake_paused("staging_full", obstacle)
                await self._clock.sleep(POLL_S)
                obstacle = await self._obstacle(now, nbytes)
        finally:
            self._waiting -= 1
            self._tell()
        return True

    def refused(self, message: str) -> None:
        """The server could not write a dump. Until one arrives again, prompts go out one at a time."""
        self._refusal = message
        self._observer.intake_paused("staging_full", message)

    def took(self) -> None:
        """A dump arrived."""
        if self._refusal:
            self._refusal = ""
            self._tell()

    def drain(self) -> None:
        """Nobody waits for room any more."""
        self._drained = True

    def _tell(self) -> None:
        if not self._waiting and not self._refusal:
            self._observer.intake_resumed("staging_full")

    async def _obstacle(self, now: InFlight, nbytes: int) -> str | None:
        if self._refusal and now.requests:
            return self._refusal
        free = self._dumps.free()
        if free - SLACK_BYTES - now.staging_bytes >= nbytes:
            return None  # enough for all that is promised to come yet; so nobody has to look what has come already
        held = await asyncio.to_thread(self._held)
        room = free - SLACK_BYTES - max(0, now.staging_bytes - held)
        if room >= nbytes:
            return None
        return (
            f"free at least {in_words(nbytes - room)} in the dump directory: its file system has {in_words(free)} free, "
            f"{in_words(now.staging_bytes)} are promised to dumps under way, which take {in_words(held)} of it now; "
            f"expected room for a dump of {in_words(nbytes)}"
        )

    def _held(self) -> int:
        """Bytes of the dump directory's file system that promised dumps take already. Blocks briefly."""
        return sum(size for name, size in self._dumps.sizes().items() if self._ours(name))
