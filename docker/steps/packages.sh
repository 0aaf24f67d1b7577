#!/bin/sh
# Installs Debian or Ubuntu packages and leaves nothing else behind:  docker/steps/packages.sh PACKAGE ...
set -eu
[ $# -gt 0 ] || { echo "usage: packages.sh PACKAGE ..." >&2; exit 2; }
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/*
