"""A dataset with prompts more than once, for tests of what is shared."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS: Final = (0, 1, 0, 2, 1, 0, 3, 4, 4, 5)
"""Which prompt each sample has: 0, 2 and 5 have the same one, as have 1 and 4, and 7 and 8."""


def write_rows(folder: Path) -> None:
    """Writes `rows.jsonl` in a folder. Twins differ in their loss masks, on which no state depends."""
    rng = random.Random(3)
    prompts = [rng.choices(range(500), k=length) for length in (40, 70, 1, 64, 90, 33)]
    rows = []
    for number, prompt in enumerate(PROMPTS):
        ids = prompts[prompt]
        rows.append({"id": f"s{number}", "input_ids": ids, "loss_mask": [(number + at) % 2 for at in range(len(ids))]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
