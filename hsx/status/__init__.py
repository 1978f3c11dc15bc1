"""The status of a run over HTTP: read-only, on loopback, served by a process of its own.

`server` is the run's side: it binds the port, starts the process and tells it now and then how the run stands (`document`).
`child` is that process; `site` answers requests from what it was told last, behind a `guard` against slow and hostile clients.
"""

from __future__ import annotations

from hsx.status.document import VERSION
from hsx.status.server import StatusServer

__all__ = ["VERSION", "StatusServer"]
