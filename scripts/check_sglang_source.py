"""Says what the capture plugin uses of SGLang and a version's source does not have.

    python scripts/check_sglang_source.py SGLANG...

Each argument is a wheel (`pip download --no-deps sglang==X`) or a folder with the package `sglang` in it, such as an
environment's site-packages. Nothing is imported. Exits with 1 where something is missing; before a version is put into
`hsx.capture.versions`, this has to pass.
"""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from pathlib import Path

from hsx.capture.targets import missing_in_source

_SOURCE = re.compile(r"sglang/(?!.*\.\.).*\.py")


def look(place: Path, scratch: Path) -> list[str]:
    """What is missing in one wheel or folder. Raises FileNotFoundError where there is no sglang in it."""
    folder = place
    if place.suffix == ".whl":
        folder = scratch / place.stem
        with zipfile.ZipFile(place) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if _SOURCE.fullmatch(name)])
    if not (folder / "sglang" / "__init__.py").is_file():
        raise FileNotFoundError(f"{place} has no package sglang in it")
    return missing_in_source(folder / "sglang")


def main(arguments: list[str]) -> int:
    """Prints one line for each place, and one for each thing that is missing in it; returns the exit code."""
    if not arguments:
        sys.stderr.write(f"{(__doc__ or '').strip()}\n")
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for argument in arguments:
            try:
                missing = look(Path(argument), Path(scratch))
            except (OSError, zipfile.BadZipFile) as error:
                sys.stderr.write(f"{argument}: {error}\n")
                return 2
            sys.stdout.write(f"{argument}: {'all there' if not missing else f'{len(missing)} missing'}\n")
            sys.stdout.writelines(f"  {sentence}\n" for sentence in missing)
            wrong += bool(missing)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
