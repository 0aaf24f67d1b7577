#!/bin/sh
# What the container runs: the product by default, which looks at the host first, or the command it is given.
set -eu
[ $# -gt 0 ] || set -- python -m app
exec "$@"
