"""What is known of SGLang's versions, and what is said of one."""

from __future__ import annotations

import pytest

from hsx.capture.versions import KNOWN, NEWEST_READ, OLDEST, numbers, refusal, warning


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.5.23", (0, 5, 23)), ("0.5.15.post1", (0, 5, 15)), ("0.6.0rc1", (0, 6, 0)), ("0.5.20+cpu", (0, 5, 20)), ("main", ())],
)
def test_the_numbers_of_a_version(version: str, expected: tuple[int, ...]) -> None:
    assert numbers(version) == expected


def test_every_version_from_the_oldest_to_the_newest_is_known() -> None:
    assert [numbers(version) for version in KNOWN] == [(0, 5, last) for last in range(OLDEST[2], NEWEST_READ[2] + 1)]
    assert all(refusal(version) == "" for version in KNOWN)


@pytest.mark.parametrize(
    ("version", "refused", "warned"),
    [
        ("0.5.23", "", ""),
        ("0.5.20", "", "sglang 0.5.20 was read and never run with hsx (run: 0.5.18, 0.5.23)"),
        ("0.5.15.post1", "", "sglang 0.5.15.post1 is unknown to hsx"),
        ("0.7.0", "", "sglang 0.7.0 is unknown to hsx"),
        ("0.5.10.post2", "sglang is 0.5.10.post2; expected at least 0.5.11", "unknown"),
        ("main", "sglang is main; expected at least 0.5.11", "unknown"),
    ],
)
def test_what_is_said_of_a_version(version: str, refused: str, warned: str) -> None:
    assert refusal(version).startswith(refused)
    assert bool(refusal(version)) == bool(refused)
    assert warned in warning(version)
    assert bool(warning(version)) == bool(warned)
