"""`hsx` with an event loop that can be wedged: SIGUSR1 has it wait for ever, in the middle of whatever it does.

Other threads go on, the process lives, and signals are taken and change nothing: what a service manager's watchdog is for.
`python -m hsx.testing.wedging run JOB`.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

from hsx.cli import main

if TYPE_CHECKING:
    from types import FrameType


def _wedge(_number: int, _frame: FrameType | None) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _wedge)
    sys.exit(main())
