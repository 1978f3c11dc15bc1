"""Stand-in for SGLang's kernel package, whose published builds need CUDA (or, on a CPU, AMX).

SGLang imports names from here on its CPU path but calls none of them for a float32 or bfloat16 model without AMX. One that
is called after all says which it was.
"""

from __future__ import annotations

from typing import NoReturn

__version__ = "0.4.10"


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for the CPU")

    missing.__name__ = name
    return missing
