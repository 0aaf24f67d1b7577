#!/usr/bin/env bash
# Makes sure that the tests have what does not come from Python packages: Chromium, and if they can be had
# docker-compose, tini, caddy, promtool and PostgreSQL.
set -euo pipefail

say() { printf '==> %s\n' "$*" >&2; }

# -P: on the path. A function of the same name would be found, too.
browser() { type -P chromium || type -P chromium-browser || type -P google-chrome; }

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
    if [ -z "${updated:-}" ]; then
        apt-get update -qq >&2 || return 1
        updated=1
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

if ! browser >/dev/null; then
    if ! can_install; then
        printf '%s\n' "error: the tests drive Chromium, which is not here. Install it (Debian: sudo apt-get install chromium) and run them again" >&2
        exit 1
    fi
    say "Installing Chromium for the browser tests"
    apt_install chromium || { printf '%s\n' "error: apt-get could not install chromium: is the network there?" >&2; exit 1; }
fi
if ! docker compose version >/dev/null 2>&1 && ! command -v docker-compose >/dev/null && can_install; then
    say "Installing docker-compose for the test of docker-compose.yml"
    apt_install docker-compose || say "docker-compose could not be installed: that one check is skipped"
fi
if ! command -v tini >/dev/null && can_install; then
    say "Installing tini for the test of the container's command"
    apt_install tini || say "tini could not be installed: that one check is skipped"
fi
# Where systemd runs, the package would start a server on port 80.
if ! command -v caddy >/dev/null && can_install && [ ! -d /run/systemd/system ]; then
    say "Installing caddy for the test of the proxy"
    apt_install caddy || say "caddy could not be installed: that one check is skipped"
fi
# Of Prometheus only promtool is wanted; where systemd runs, the package would start the server.
if ! command -v promtool >/dev/null && can_install && [ ! -d /run/systemd/system ]; then
    say "Installing Prometheus for its check of our files"
    apt_install prometheus || say "Prometheus could not be installed: that one check is skipped"
fi
# The tests start servers of their own; where systemd runs, the package would start one too.
if ! command -v initdb >/dev/null && ! compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null && can_install &&
    [ ! -d /run/systemd/system ]; then
    say "Installing PostgreSQL for the tests of the other database"
    apt_install postgresql || say "PostgreSQL could not be installed: its tests are skipped"
fi
