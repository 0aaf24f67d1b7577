#!/usr/bin/env bash
# Runs pytest away from the operator's own data, and ends what the tests started but did not stop.
# Arguments go to pytest. Without any -m among them, the tests marked slow are left out. Files run side by side, as
# tests/workers.py says; `-n 0` among the arguments has them run one after the other.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d "${TMPDIR:-/tmp}/tangram-tests.XXXXXX")
mark=TANGRAM_TEST_RUN=$(basename "$scratch")

# Engines and browsers run in sessions of their own, so a process group does not hold them all; what they inherit
# in their environment does.
started() {
    grep -lzxF "$mark" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3
}

clean_up() {
    local left waited
    left=$(started)
    if [ -n "$left" ]; then
        # shellcheck disable=SC2086 # one word for each process
        kill -TERM $left 2>/dev/null
        for waited in 1 2 3 4 5 6 7 8 9 10; do
            left=$(started)
            [ -n "$left" ] || break
            sleep 0.5
        done
        # shellcheck disable=SC2086
        [ -z "$left" ] || kill -KILL $left 2>/dev/null
    fi
    rm -rf "$scratch"
}
trap clean_up EXIT
trap 'wait "$pytest"; exit 130' INT # Ctrl-C reaches pytest too: let it tear down
trap 'exit 143' TERM HUP

selection=(-m "not slow")
for argument in "$@"; do
    case $argument in -m*) selection=() ;; esac
done
# In the background so that a signal is acted on at once; bash would have it ignore Ctrl-C there.
env --default-signal=INT "$mark" TANGRAM_HOME="$scratch/home" HF_HUB_OFFLINE=1 GRADIO_ANALYTICS_ENABLED=False \
    .venv/bin/python -m pytest "${selection[@]}" -n auto --dist loadfile --no-loadscope-reorder "$@" &
pytest=$!
wait "$pytest"
