"""The rules of hsx: pure functions and records, standard library only.

No asyncio, torch, clock, I/O or logging in here; time and randomness are arguments. What a rule decides, the callers in
`pipeline.py`, `writer.py`, `supervisor.py` and `watchdog.py` do. `tests/core/test_imports.py` holds the boundary.
"""
