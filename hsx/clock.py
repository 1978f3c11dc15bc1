"""The real clock."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """The real clock; implements `hsx.ports.Clock`."""

    def monotonic(self) -> float:
        """Seconds since boot or so."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleeps on the event loop."""
        await asyncio.sleep(seconds)
