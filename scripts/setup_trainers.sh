#!/bin/bash
# setup_trainers.sh [FOLDER]: an environment with the trainers whose own code judges exports.
#
# FOLDER is .venvs/trainers in this repository. CPU only, about 350 MB: torch, transformers and whatever else hsx's own
# environment has (.venv, or HSX_ENVIRONMENT) are taken from there, hsx included, so that has to be set up first. A second call
# with nothing changed returns at once. The trainers themselves are installed without their dependencies: SpecForge asks for
# SGLang and an older torch, speculators for torchvision and torchaudio, AngelSlim for ray and lm_eval, which nothing of what is
# used imports; what is imported, and hsx has not, is named here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(dirname "$here")
folder=${1:-$repo/.venvs/trainers}
shared=${HSX_ENVIRONMENT:-$repo/.venv}
if [ ! -x "$shared/bin/python" ]; then
  echo "setup_trainers.sh: $shared has no Python; expected hsx's own environment there, call 'make setup' first" >&2
  exit 3
fi
stamp=$folder/.hsx-environment
environment=$(echo "$shared" | cat - "$0" "$repo/pyproject.toml" "$repo/constraints.txt" | sha256sum)
[ "$(cat "$stamp" 2>/dev/null || true)" = "$environment" ] && exit 0

rm -rf "$folder"
"$shared/bin/python" -m venv --without-pip "$folder"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Behind the folder's own packages, with the .pth files of the other environment: hsx may be installed by one of these.
echo "import site; site.addsitedir('$(site "$shared")')" > "$(site "$folder")/hsx-shared.pth"
pip() { "$shared/bin/python" -m pip --python "$folder/bin/python" --quiet --disable-pip-version-check "$@"; }
pip install --constraint "$repo/constraints.txt" --only-binary :all: \
  'datasets>=4,<=5.1' accelerate httpx nvidia-ml-py omegaconf 'openai>=2' 'pulp<4' scipy
pip install --no-deps --only-binary :all: speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0 nvidia-modelopt==0.47.0 \
  angelslim==0.5.0
echo "$environment" > "$stamp"
echo "trainers with hsx: $folder/bin/python"
