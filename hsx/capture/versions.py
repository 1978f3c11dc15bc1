"""Which versions of SGLang hsx knows, and how well. Standard library only; docs/compatibility.md is made from this.

Every version not in `KNOWN` is new to hsx: `hsx serve` says so and starts it, if the source has what the plugin uses
(`hsx.capture.targets`); whether the states are right is then for the proof of the first forward and the boot canary to tell.
"""

from __future__ import annotations

from typing import Final, Literal

OLDEST: Final = (0, 5, 11)
"""The first version with plugins and with `set_dflash_layers_to_capture`."""
NEWEST_READ: Final = (0, 5, 23)
Status = Literal["run", "read"]
KNOWN: Final[dict[str, Status]] = {
    "0.5.11": "read",
    "0.5.12": "read",
    "0.5.13": "read",
    "0.5.14": "read",
    "0.5.15": "read",
    "0.5.16": "read",
    "0.5.17": "read",
    "0.5.18": "run",
    "0.5.19": "read",
    "0.5.20": "read",
    "0.5.21": "read",
    "0.5.22": "read",
    "0.5.23": "run",
}
"""`run`: installed, and its states held against Hugging Face by the tests. `read`: its source has all that the plugin uses."""
BAD: Final[dict[str, str]] = {}
"""Versions that are refused, and why. None is known to be."""


def numbers(version: str) -> tuple[int, ...]:
    """The release's three numbers; what follows them (`.post1`, `rc1`, `+cpu`) is left out."""
    found: list[int] = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: next((at for at, sign in enumerate(part) if not sign.isdecimal()), len(part))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def refusal(version: str) -> str:
    """Why this version is refused, in one sentence; "" where it is not."""
    if numbers(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"sglang is {version}; expected at least {oldest}, the first with the hooks that hsx uses"
    if version in BAD:
        return f"sglang is {version}; expected another version: {BAD[version]}"
    return ""


def warning(version: str) -> str:
    """What to know before this version is trusted, in one sentence; "" where the tests ran it."""
    status = KNOWN.get(version)
    if status == "run":
        return ""
    run = ", ".join(known for known, how in KNOWN.items() if how == "run")
    if status == "read":
        return f"sglang {version} was read and never run with hsx (run: {run}); the boot canary has to vouch for it"
    return f"sglang {version} is unknown to hsx (run: {run}); the boot canary has to vouch for it"
