#!/usr/bin/env bash
# Packs an installation into one archive, to be carried to a host without a network.
#
#   docker/bundle.sh wheels LOCK OUT.tar      the packages of a lock and the product: for a host without Docker, with
#                                             the same Python and processor. LOCK: requirements.lock or
#                                             requirements-cuda.lock
#   docker/bundle.sh image IMAGE OUT.tar      an image that was built here, with docker-compose.yml
#
#   MODEL        a model's directory to pack too; without it the small bundled model is served
#   PROFILE      a profile's file to pack too
#   PYTHON       the Python of the host to be (default python3), for wheels
#   TORCH_INDEX  a further package index to take torch from; for requirements.lock: PyTorch's CPU index
#
# There: tar -xf OUT.tar && tangram-chat/install.sh
set -euo pipefail

die() { printf 'error: %s\n' "$*" >&2; exit 2; }

[ $# = 3 ] || { echo "usage: docker/bundle.sh wheels LOCK OUT.tar | image IMAGE OUT.tar" >&2; exit 2; }
kind=$1 what=$2 out=$(realpath -m "$3")
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ ! -e "$out" ] || die "$out is there already: name another file"
[ -z "${MODEL:-}" ] || [ -f "$MODEL/config.json" ] || die "MODEL=$MODEL is no model's directory: it has no config.json"
[ -z "${PROFILE:-}" ] || [ -f "$PROFILE" ] || die "PROFILE=$PROFILE is not there"

mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$out.XXXXXX")
trap 'rm -rf "$work"' EXIT
bundle=$work/tangram-chat
mkdir "$bundle"

case $kind in
    wheels)
        [ -f "$what" ] || die "there is no lock $what"
        python=${PYTHON:-python3}
        index=()
        [ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
        options=(--disable-pip-version-check --no-input --no-deps)
        "$python" -m pip wheel "${options[@]}" "${index[@]}" --wheel-dir "$bundle/wheels" -r "$what"
        cp "$what" "$bundle/lock"
        # In a copy, so that the tree stays as it is.
        mkdir "$work/tree"
        for part in LICENSE README.md pyproject.toml app admin db tangram kernels; do
            cp -R "$source/$part" "$work/tree/"
        done
        "$python" -m pip wheel "${options[@]}" --wheel-dir "$bundle/product" "$work/tree"
        "$python" "$source/scripts/bundle_facts.py" "$bundle/wheels" "$what" >"$bundle/python"
        ;;
    image)
        docker image inspect "$what" >/dev/null || die "there is no image $what: build it first (docker compose build)"
        docker save --output "$bundle/image.tar" "$what"
        printf '%s\n' "$what" >"$bundle/image"
        mkdir "$bundle/compose"
        cp "$source/docker-compose.yml" "$source/.env.example" "$bundle/compose/"
        mkdir "$bundle/compose/docker"
        cp -R "$source/docker/caddy" "$source/docker/grafana" "$source/docker/prometheus" "$bundle/compose/docker/"
        ;;
    *) die "the first argument is wheels or image, not $kind" ;;
esac
# Links of a hub's cache are followed: the archive holds the files themselves.
[ -z "${MODEL:-}" ] || cp -RL "$MODEL" "$bundle/model"
[ -z "${PROFILE:-}" ] || cp "$PROFILE" "$bundle/profile.json"
cp "$source/docker/bundle/install.sh" "$bundle/"
chmod -R a+rX "$bundle" # the container's user reads it
(cd "$bundle" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >SHA256SUMS)
tar -C "$work" -cf "$work/bundle.tar" tangram-chat
mv "$work/bundle.tar" "$out"
echo "$out: $(du -h "$out" | cut -f1); on the host: tar -xf $(basename "$out") && tangram-chat/install.sh"
