#!/bin/sh
# What the container runs: the product by default, or the command it is given.
set -eu

if ! [ -w "$TANGRAM_HOME" ]; then
    echo "error: $TANGRAM_HOME is not writable by user $(id -u): the volume there must belong to it (chown -R $(id -u) on the host)" >&2
    exit 1
fi
if [ "${TANGRAM_EXPECT_GPU:-}" = 1 ] && ! command -v nvidia-smi >/dev/null; then
    echo "error: no GPU is visible in the container: install the NVIDIA Container Toolkit on the host and reserve a GPU, as docker-compose.yml does" >&2
    exit 1
fi
[ $# -gt 0 ] || set -- python -m app
exec "$@"
