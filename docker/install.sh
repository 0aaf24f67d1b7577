#!/usr/bin/env bash
# Installs the product as the images have it, without Docker:  docker/install.sh LOCK VENV
#
#   LOCK: requirements.lock or requirements-cuda.lock. The product goes into VENV/product, its commands too.
#   PYTHON, TORCH_INDEX: see docker/steps/venv.sh
set -euo pipefail

[ $# = 2 ] || { echo "usage: docker/install.sh LOCK VENV" >&2; exit 2; }
steps=$(cd "$(dirname "${BASH_SOURCE[0]}")/steps" && pwd)
"$steps/venv.sh" "$1" "$2"
venv=$(cd "$2" && pwd)
"$steps/link.sh" "$venv" "$venv/product"
"$steps/product.sh" "$venv" "$venv/product"
