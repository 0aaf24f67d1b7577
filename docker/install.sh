#!/usr/bin/env bash
# Installs the product into a virtual environment. Both images are built with it, and it runs without Docker too.
#
#   docker/install.sh LOCK VENV      LOCK: requirements.lock or requirements-cuda.lock
#
#   PYTHON       the Python to use (default python3)
#   TORCH_INDEX  a further package index to take torch from; for requirements.lock: PyTorch's CPU index
set -euo pipefail

[ $# = 2 ] || { echo "usage: docker/install.sh LOCK VENV" >&2; exit 2; }
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lock=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
venv=$2
options=(--disable-pip-version-check --no-input --no-deps)

"${PYTHON:-python3}" -m venv "$venv"
index=()
[ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
"$venv/bin/python" -m pip install "${options[@]}" "${index[@]}" -r "$lock"
"$venv/bin/python" "$source/scripts/complete_torch.py"
# Built in a copy, so that the source stays as it is; a real install, so that the image needs no source tree.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
for part in LICENSE README.md pyproject.toml app admin db tangram kernels; do
    cp -R "$source/$part" "$copy/"
done
"$venv/bin/python" -m pip install "${options[@]}" --no-build-isolation "$copy"
"$venv/bin/python" -m compileall -q "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/app"
