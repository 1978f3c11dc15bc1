"""`hsx verify`: proves what is stored. Start at `store`, which reads every shard; `against_hf` recomputes some samples."""

from __future__ import annotations

from hsx.verify.report import KINDS, LISTED, OF_SHARDS, Damage, Reading, VerifyReport
from hsx.verify.store import verify

__all__ = ["KINDS", "LISTED", "OF_SHARDS", "Damage", "Reading", "VerifyReport", "verify"]
