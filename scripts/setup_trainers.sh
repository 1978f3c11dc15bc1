#!/bin/bash
# setup_trainers.sh [FOLDER]: an environment with the trainers whose own loaders judge exports, and hsx in it.
#
# FOLDER is .venvs/trainers in this repository. CPU only, about 1.8 GB; a second call with nothing changed returns at once. The
# trainers themselves are installed without their dependencies: SpecForge asks for SGLang and an older torch, speculators for
# torchvision and torchaudio, which the loaders do not import; what they do import is named here. Needs Python 3.11 or later.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(dirname "$here")
folder=${1:-$repo/.venvs/trainers}
stamp=$folder/.hsx-environment
environment=$(cat "$0" "$repo/pyproject.toml" | sha256sum)
[ "$(cat "$stamp" 2>/dev/null || true)" = "$environment" ] && exit 0

python=${PYTHON:-python3.11}
command -v "$python" > /dev/null || python=python3
rm -f "$stamp"
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0 transformers==5.19.0 'datasets>=4,<=5.1' 'numpy>=2,<=2.5.4' safetensors \
  accelerate aiohttp httpx 'loguru>=0.7.2,<=0.7.3' ninja nvidia-ml-py omegaconf 'openai>=2' protobuf psutil 'pulp<4' \
  'pydantic>=2' pydantic-settings PyYAML regex requests rich scipy tqdm 'typer>=0.12' \
  'google-crc32c>=1.5' 'msgspec>=0.19' 'numcodecs>=0.15' 'zarr>=3.1,<4' 'zstandard>=0.22'
pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0 nvidia-modelopt==0.47.0
pip install --no-deps --editable "$repo"
echo "$environment" > "$stamp"
echo "trainers with hsx: $folder/bin/python"
