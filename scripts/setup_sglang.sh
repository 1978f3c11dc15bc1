#!/bin/bash
# setup_sglang.sh [VERSION] [FOLDER]: an environment in which the real SGLang server runs on a CPU, with hsx in it.
#
# VERSION is 0.5.23 (default) or 0.5.18; FOLDER is .venvs/sglang-VERSION in this repository. Text models only, no GPU and no
# AMX needed. About two minutes and 2.6 GB; a second call with nothing changed returns at once. HSX_EDITABLE=1 installs hsx
# editable. Needs Python 3.11 with venv, on Linux x86-64.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(dirname "$here")
version=${1:-0.5.23}
folder=${2:-$repo/.venvs/sglang-$version}

# transformers, openai and xgrammar are the versions that each SGLang release asks for itself.
case $version in
  0.5.23) pins=(transformers==5.19.0 openai==2.8.0 compressed-tensors==0.18.0); kernels=(xgrammar==0.2.7) ;;
  0.5.18) pins=(transformers==5.12.1 openai==2.6.1 compressed-tensors); kernels=(xgrammar==0.2.1) ;;
  *) echo "setup_sglang.sh: no pins for sglang $version; expected 0.5.23 or 0.5.18" >&2; exit 2 ;;
esac
if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
  echo "setup_sglang.sh: this is $(uname -s)-$(uname -m); expected Linux-x86_64" >&2
  exit 3
fi

# The stamp covers what is installed, hsx itself only by its metadata: reinstalling hsx alone takes seconds.
environment=$(cat "$0" "$here"/sglang_cpu/pyproject.toml "$here"/sglang_cpu/*.p* "$here"/sglang_cpu/sgl_kernel/*.py | sha256sum)
sources=$( (cd "$repo" && cat pyproject.toml && find hsx -name '*.py' -o -name '*.txt' | LC_ALL=C sort | xargs cat) | sha256sum)
[ "${HSX_EDITABLE:-0}" = 1 ] && sources="editable $(sha256sum < "$repo/pyproject.toml")"
stamp=$folder/.hsx-environment
stamp_hsx=$folder/.hsx-sources

pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ "$(cat "$stamp" 2>/dev/null || true)" != "$environment" ]; then
  python=${PYTHON:-python3.11}
  command -v "$python" > /dev/null || python=python3
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "setup_sglang.sh: $python is not Python 3.11; set PYTHON" >&2
    exit 3
  }
  echo "setting up SGLang $version in $folder (two to five minutes)"
  rm -f "$stamp" "$stamp_hsx"
  [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
  pip install -q 'pip==25.3'
  # A CPU torch first: SGLang's own requirements would bring gigabytes of CUDA. What follows is what its text path imports.
  pip install -q torch==2.13.0 "${pins[@]}" apache-tvm-ffi==0.1.11 \
    numpy aiohttp requests fastapi 'uvicorn>=0.51' uvloop orjson msgspec 'pyzmq>=25.1.2' psutil pybase64 pillow \
    'prometheus-client>=0.20.0' python-multipart setproctitle partial_json_parser interegular einops sentencepiece==0.2.1 \
    packaging watchfiles xxhash zstandard ipython gguf distro dill jsonschema soundfile==0.13.1
  pip install -q --no-deps "sglang==$version" "${kernels[@]}" torchvision==0.28.0 triton==3.9.0
  pip install -q --no-deps --force-reinstall "$here/sglang_cpu"
fi
if [ "$(cat "$stamp_hsx" 2>/dev/null || true)" != "$sources" ]; then
  if [ "${HSX_EDITABLE:-0}" = 1 ]; then
    pip install -q --no-deps -e "$repo"
  else
    pip install -q --no-deps --force-reinstall "$repo"
  fi
fi
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$environment" ]; then
  SGLANG_USE_CPU_ENGINE=1 "$folder/bin/python" -W ignore -c 'import sglang.srt.entrypoints.http_server'
fi
echo "$sources" > "$stamp_hsx"
echo "$environment" > "$stamp"
echo "sglang $version with hsx: $folder/bin/python"
