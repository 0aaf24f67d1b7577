#!/usr/bin/env bash
# Installs the packages of a lock into a new virtual environment: the largest layer, which changes with the lock only.
#
#   docker/steps/venv.sh LOCK VENV
#
#   PYTHON       the Python to use (default python3)
#   TORCH_INDEX  a further package index to take torch from; for requirements.lock: PyTorch's CPU index
set -euo pipefail

[ $# = 2 ] || { echo "usage: docker/steps/venv.sh LOCK VENV" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
index=()
[ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")

"${PYTHON:-python3}" -m venv "$2"
"$2/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps "${index[@]}" -r "$1"
"$2/bin/python" "$here/scripts/complete_torch.py"
