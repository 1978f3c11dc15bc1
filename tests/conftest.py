"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No test may depend on the machine being fast or idle, so examples have no deadline; and a failure must be repeatable.
settings.register_profile("hsx", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hsx")
