"""Requests that end before their answer: clients that take theirs back, and clients that go away."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import aiohttp

from hsx.core.dump import PART_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from hsx.core.marker import Marker
    from hsx.testing.capture_server import CaptureServer

How = Literal["abort", "disconnect"]


async def cut_short(server: CaptureServer, victims: Mapping[Marker, NDArray[np.int32]], how: How, new_tokens: int = 0) -> None:
    """Sends all prompts at once, and ends all of them as soon as one has a partial dump.

    That one is being prefilled then, and most of the others wait in the queue. Returns once each is answered (`abort`), or its
    connection is gone (`disconnect`): the server notices that later.

    Args:
        server: where to.
        victims: ids, int32 [tokens], by marker.
        how: `abort` posts to /abort_request, by rid; `disconnect` drops the connections.
        new_tokens: to be generated.

    Raises RuntimeError for an answer other than 200.
    """
    url = f"http://127.0.0.1:{server.port}"
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:

        async def post(path: str, body: Mapping[str, object]) -> None:
            async with session.post(url + path, json=body) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise RuntimeError(f"{body.get('rid')}: HTTP {answer.status}: {text}")

        sampling = {"max_new_tokens": new_tokens, "temperature": 0}
        tasks = {
            marker: asyncio.create_task(
                post("/generate", {"rid": str(marker), "input_ids": ids.tolist(), "sampling_params": sampling})
            )
            for marker, ids in victims.items()
        }
        while not all(task.done() for task in tasks.values()):
            if any((server.dumps / f"{marker}{PART_SUFFIX}").exists() for marker in victims):
                break
            await asyncio.sleep(0.001)
        if how == "abort":
            await asyncio.gather(*(post("/abort_request", {"rid": str(marker)}) for marker in victims))
            await asyncio.gather(*tasks.values())
        else:
            for task in tasks.values():
                task.cancel()
            for outcome in await asyncio.gather(*tasks.values(), return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome
