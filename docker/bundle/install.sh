#!/usr/bin/env bash
# Installs a bundle that docker/bundle.sh made. Nothing is fetched from anywhere.
#
#   install.sh DIRECTORY     of wheels: makes DIRECTORY, with a command `start` in it
#   install.sh               of an image: loads it, puts model and profile into its volumes, says how to start it
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

die() { printf 'error: %s\n' "$*" >&2; exit 2; }

(cd "$here" && sha256sum --quiet --check SHA256SUMS >&2) || die "the bundle is damaged or not whole: carry it over again"

if [ -d "$here/wheels" ]; then
    [ $# = 1 ] || die "usage: install.sh DIRECTORY"
    [ ! -e "$1" ] || [ -z "$(ls -A "$1")" ] || die "$1 is not empty: name a new directory"
    read -r version packer <"$here/python"
    python=${PYTHON:-python$version}
    found=$("$python" -c 'import sys, sysconfig; print("%d.%d" % sys.version_info[:2], sysconfig.get_platform())') \
        || die "Python $version is needed: install it, or name it in PYTHON"
    [ "$found" = "$version $packer" ] || die "the bundle is for Python $version on $packer, and $python is $found: name another in PYTHON"
    mkdir -p "$1"
    target=$(cd "$1" && pwd)
    "$python" -m venv "$target/venv" || die "$python cannot make virtual environments: install its venv module (Debian and Ubuntu: python3-venv)"
    install=("$target/venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-index --no-deps)
    # Not the host's own settings: there is nothing to be asked.
    export PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS=
    "${install[@]}" --find-links "$here/wheels" -r "$here/lock"
    "${install[@]}" "$here"/product/*.whl
    {
        printf '#!/bin/sh\n# Starts Tangram Chat as it was carried here; settings in the environment win.\nset -eu\n'
        printf 'here=$(cd "$(dirname "$0")" && pwd)\n'
        printf 'export TANGRAM_HOME="${TANGRAM_HOME:-$here/data}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"\n'
        [ ! -d "$here/model" ] || printf 'export MODEL="${MODEL:-$here/model}"\n'
        [ ! -f "$here/profile.json" ] || printf 'export TANGRAM_PROFILE="${TANGRAM_PROFILE:-$here/profile.json}"\n'
        case $(cat "$here/lock") in
            *nvidia-*) printf 'export TANGRAM_EXPECT_GPU="${TANGRAM_EXPECT_GPU:-1}" VLLM_USE_FLASHINFER_SAMPLER="${VLLM_USE_FLASHINFER_SAMPLER:-0}"\n' ;;
        esac
        printf 'exec "$here/venv/bin/python" -m app "$@"\n'
    } >"$target/start"
    chmod 0755 "$target/start"
    [ ! -d "$here/model" ] || cp -R "$here/model" "$target/model"
    [ ! -f "$here/profile.json" ] || cp "$here/profile.json" "$target/profile.json"
    echo "installed; start it with $target/start"
else
    [ $# = 0 ] || die "usage: install.sh"
    docker load --input "$here/image.tar"
    cd "$here/compose"
    [ -e .env ] || cp .env.example .env
    case $(cat "$here/image") in *-cpu:*) service=cpu ;; *) service=tangram-chat ;; esac
    set_in_env() { # NAME VALUE: in .env, whose other lines stay
        sed "s|^$1=.*|$1=$2|" .env >.env.new && mv .env.new .env
    }
    into_volume() { # FILE NAME
        docker compose run --rm --no-deps -T -v "$here:/bundle:ro" --entrypoint cp "$service" -RT "/bundle/$1" "/data/models/$2"
    }
    if [ -d "$here/model" ]; then
        into_volume model carried
        set_in_env MODEL /data/models/carried
    fi
    if [ -f "$here/profile.json" ]; then
        into_volume profile.json profile.json
        set_in_env TANGRAM_PROFILE /data/models/profile.json
    fi
    set_in_env HF_HUB_OFFLINE 1
    echo "installed; start it with: cd $here/compose && docker compose up -d --no-build $service"
fi
