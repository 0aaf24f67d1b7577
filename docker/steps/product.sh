#!/usr/bin/env bash
# Installs the product beside the packages, in a folder of its own: a small layer, which changes with the source.
#
#   docker/steps/product.sh VENV FOLDER      VENV: made by docker/steps/venv.sh
#
# Afterwards VENV's Python finds it, with its entry points; its commands are in FOLDER/bin.
set -euo pipefail

[ $# = 2 ] || { echo "usage: docker/steps/product.sh VENV FOLDER" >&2; exit 2; }
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$1/bin/python
# Built in a copy, so that the source stays as it is; a real install, so that the image needs no source tree.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
for part in LICENSE README.md pyproject.toml app admin db tangram kernels; do
    cp -R "$source/$part" "$copy/"
done
"$python" -m pip install --disable-pip-version-check --no-input --no-deps --no-build-isolation --target "$2" "$copy"
"$python" -m compileall -q "$2"
