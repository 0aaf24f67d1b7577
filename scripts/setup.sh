#!/usr/bin/env bash
# Brings .venv in line with requirements.lock and pyproject.toml; does nothing when it already is.
# With VENV and LOCK, another environment with another lock: `make up` uses that on a host with a GPU.
#
#   PYTHON       the Python to build .venv with (default: the first of python3, python3.12, ... that is new enough)
#   TORCH_INDEX  a further package index to take torch from, such as PyTorch's CPU index
#
# What pip says goes to set-up.log in the environment; the terminal gets a line a step and now and then how far it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

venv=${VENV:-.venv}
lock=${LOCK:-requirements.lock}
python=$venv/bin/python
stamp=$venv/.set-up-from
log=$venv/set-up.log

fingerprint() {
    # The path is part of it: scripts and the link to this tree hold it, so a moved tree is set up anew.
    { printf '%s\n' "$PWD"; cat "$lock" pyproject.toml; } | sha256sum | cut -d' ' -f1
}

# The CUDA lock was resolved for Python 3.12 and holds for no other.
new_enough() {
    case $lock in
        *cuda*) "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ;;
        *) "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ;;
    esac
}
case $lock in *cuda*) wanted="Python 3.12, for the CUDA build" ;; *) wanted="Python 3.11 or newer" ;; esac

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || die "PYTHON=$PYTHON is not a $wanted"
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11 python3.13; do
        if new_enough "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "$wanted is needed, and python3 is $(python3 -V 2>&1 || true). Install one, or name it: make up PYTHON=/path/to/python3.12"
}

create_venv() {
    local base
    base=$(find_python)
    say "Creating $venv with $("$base" -V 2>&1)"
    "$base" -m venv --clear "$venv" >&2 || die "$base cannot make virtual environments: install its venv module (Debian and Ubuntu: apt-get install python3-venv)"
}

# Every 10 seconds, how far pip is with the lock, until this is killed or the script has ended.
tell_progress() {
    local count fetched now="" before=""
    count=$(grep -c '^[[:alnum:]]' "$lock")
    while sleep "${TICK:-10}" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        if grep -q '^Installing collected packages' "$log"; then
            now="all packages are there, and are being installed"
        else
            fetched=$(grep -cE '^(Processing| *Downloading| *Using cached) .*\.(whl|tar\.gz) ' "$log" || true)
            now="$fetched of $count packages fetched"
            now+=$(sed -nE 's/^ *Downloading ([^ ]*)-[0-9][^ ]*\.(whl|tar\.gz) (\(.*\))$/, now \1 \3/p' "$log" | tail -n 1)
        fi
        [ "$now" = "$before" ] || say "  $now"
        before=$now
    done
}

# Runs a step with its output in the log, whose end is shown when it fails.
logged() {
    local code=0
    printf '\n$ %s\n' "$*" >>"$log"
    PYTHONUNBUFFERED=1 "$@" >>"$log" 2>&1 || code=$?
    if [ "$code" != 0 ]; then
        say "This failed. The end of $log, which has all of it:"
        tail -n 20 "$log" >&2
    fi
    return "$code"
}

install() {
    logged "$python" -m pip install --disable-pip-version-check --no-input --no-deps "$@"
}

install_lock() {
    local options=()
    [ -z "${TORCH_INDEX:-}" ] || options=(--extra-index-url "$TORCH_INDEX")
    local size="about 1 GB"
    case $lock in *cuda*) size="many GB, with the CUDA libraries" ;; esac
    say "Installing the packages of $lock ($size; minutes the first time; pip's words are in $log)"
    tell_progress 9>&- &  # 9: the lock, which must not outlive this script
    ticker=$!
    install --progress-bar off "${options[@]}" -r "$lock" || die "the packages could not be installed. Is the network there, and is pip set to an index that has them (PIP_INDEX_URL)? What was fetched is kept: run the same again to go on"
    stop_ticker
}

stop_ticker() {
    [ -z "${ticker:-}" ] || kill "$ticker" 2>/dev/null || true
    ticker=
}
trap stop_ticker EXIT

case $PWD in
    *[[:space:]]*) die "the path of this tree has a space in it ($PWD), where PyTorch's compiler cannot work: move the tree" ;;
esac
[ "$(uname -s)" = Linux ] || die "Linux is needed (this is $(uname -s)): elsewhere use the Docker image"
if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
    exit 0
fi
for compiler in "${CXX:-g++}" c++ clang++; do
    if command -v "$compiler" >/dev/null; then found_compiler=$compiler; break; fi
done
[ -n "${found_compiler:-}" ] || die "a C++ compiler is needed, to build the CPU kernels once: install one (Debian and Ubuntu: apt-get install g++)"
if command -v flock >/dev/null; then
    exec 9<pyproject.toml
    flock --nonblock 9 || { say "Waiting for another set-up of this tree"; flock 9; }
fi
if ! { [ -x "$python" ] && new_enough "$python" && "$python" -m pip --version >/dev/null 2>&1; }; then
    create_venv
fi
# One that was made elsewhere and moved here has scripts that still point there.
case $(grep '^command = ' "$venv/pyvenv.cfg" || true) in
    *" $PWD/$venv") ;;
    *) create_venv ;;
esac
rm -f "$stamp"
: >"$log"
install_lock
"$python" scripts/complete_torch.py >>"$log" || die "torch's libraries could not be installed"
say "Installing this project in place"
install --quiet --no-build-isolation --config-settings editable_mode=compat --editable . || die "this project could not be installed into $venv"
fingerprint >"$stamp"
say "$venv is ready"
