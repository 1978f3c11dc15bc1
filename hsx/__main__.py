"""`python -m hsx`: the same as the command `hsx`."""

from __future__ import annotations

import sys

from hsx.cli import main

sys.exit(main())
