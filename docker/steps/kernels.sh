#!/usr/bin/env bash
# Compiles the CUDA kernels ahead, with the nvcc among the environment's packages (or NVCC). No GPU is needed.
#
#   docker/steps/kernels.sh VENV OUT [option of build-cuda ...]      default options: --arch sm_80 sm_90
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: docker/steps/kernels.sh VENV OUT [OPTION ...]" >&2; exit 2; }
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(cd "$1/bin" && pwd)/python
out=$2
shift 2
[ $# -gt 0 ] || set -- --arch sm_80 sm_90
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$source"
"$python" -m kernels build-cuda --out "$out" "$@"
