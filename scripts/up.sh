#!/usr/bin/env bash
# What `make up` runs: sets up what is missing and becomes the product. On a host with an NVIDIA GPU that is the
# CUDA build, in a virtual environment of its own beside that of the tests.
#
#   TANGRAM_BUILD   cpu or cuda; default: cuda where there is an NVIDIA GPU, else cpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=${TANGRAM_BUILD:-}
if [ -z "$build" ]; then
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then build=cuda; else build=cpu; fi
fi
case $build in
    cpu)
        scripts/setup.sh
        exec .venv/bin/python -m app
        ;;
    cuda)
        VENV=.venv-cuda LOCK=requirements-cuda.lock scripts/setup.sh
        # FlashInfer's sampler compiles for minutes at its first use: vLLM's own does without.
        export TANGRAM_EXPECT_GPU=${TANGRAM_EXPECT_GPU:-1} VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
        exec .venv-cuda/bin/python -m app
        ;;
    *)
        echo "error: TANGRAM_BUILD must be cpu or cuda, not $build" >&2
        exit 2
        ;;
esac
