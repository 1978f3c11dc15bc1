#!/bin/bash
# setup_zarr.sh [FOLDER]: an environment with zarr 3.4, which needs Python 3.12, and hsx in it, to try stores with.
#
# FOLDER is .venvs/zarr-3.4 in this repository. Takes some seconds; a second call with nothing changed returns at once. Looks for
# a Python of 3.12 or later under its usual names and among pyenv's; PYTHON_NEW names another one. On a machine without one
# FOLDER holds only the reason, in `absent`, with which the tests that need it are skipped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(dirname "$here")
folder=${1:-$repo/.venvs/zarr-3.4}
stamp=$folder/.hsx-environment
environment=$(cat "$0" "$repo/pyproject.toml" | sha256sum)
[ "$(cat "$stamp" 2>/dev/null || true)" = "$environment" ] && exit 0

new_enough() { "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

python=
for candidate in ${PYTHON_NEW:+"$PYTHON_NEW"} python3.12 python3.13 python3.14 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
  if new_enough "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  mkdir -p "$folder"
  echo "zarr 3.4 needs Python 3.12 or later, and none was found; set PYTHON_NEW" | tee "$folder/absent" >&2
  exit 0
fi
rm -f "$stamp" "$folder/absent"
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install 'zarr>=3.4,<3.5' 'zarrs>=0.2.3' 'tensorstore>=0.1.70' 'awscrt>=0.31' 'msgspec>=0.19' 'numcodecs>=0.15'
pip install --no-deps --editable "$repo"
echo "$environment" > "$stamp"
echo "zarr 3.4 with hsx: $folder/bin/python"
