#!/bin/sh
# Makes the user that the container runs as, and the folders of its volumes:  docker/steps/user.sh [ROOT]
# ROOT (default: none) goes before the folders; with it no user is made.
set -eu
root=${1:-}
if [ -z "$root" ]; then
    useradd --uid 10001 --user-group --no-create-home --home-dir /data tangram
fi
for folder in /data /data/cache /data/models; do
    mkdir -p "$root$folder"
    chmod 0700 "$root$folder"
    [ -n "$root" ] || chown tangram:tangram "$folder"
done
