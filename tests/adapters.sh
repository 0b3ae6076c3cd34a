#!/usr/bin/env bash
# The adapters of envs/ to GEM, verifiers, mini-swe-agent and OpenEnv with the real packages: makes .venv-adapters (2 GB) and
# .venv-openenv (1.6 GB), a minute or two each, once, and runs the tests that need them. A test that is skipped fails the suite.
# bash tests/adapters.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

# install ENVIRONMENT PINS [packages]: rl2 with packages. The pins replace those of constraints.txt.
install() {
    local env=$1 pins=$2 fingerprint
    shift 2
    fingerprint="$(cat tests/adapters.sh "$pins" setup.py constraints.txt | cksum)"
    grep -qxF "$fingerprint" "$env/installed" 2>/dev/null && return
    echo "installing rl2 with $* into $env (a minute or two) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    { grep -vf <(sed -n 's/^\([^#]*==\).*/^\1/p' "$pins") constraints.txt; cat "$pins"; } >"$env/constraints.txt"
    "$env/bin/python" -m pip install -qq -c "$env/constraints.txt" "$(grep '^torch==' constraints.txt)"
    "$env/bin/python" -m pip install -qq -c "$env/constraints.txt" pytest "$@" -e .
    if [ "$env" = .venv-adapters ]; then # GEM asks for old releases of what it needs
        "$env/bin/python" -m pip install -qq -c "$env/constraints.txt" --no-deps gem-llm
    fi
    echo "$fingerprint" >"$env/installed"
}

# run_tests ENVIRONMENT EXPRESSION [pytest arguments]
run_tests() {
    local env=$1 expression=$2
    shift 2
    OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -x -q -rs --durations=5 --junitxml="$env/report.xml" \
        tests/test_ready_envs.py -k "$expression" "$@"
    grep -q ' skipped="0"' "$env/report.xml" || {
        echo "a test was skipped: see above which package is missing" >&2
        exit 1
    }
}

install .venv-adapters tests/adapters.txt reasoning-gym verifiers mini-swe-agent
run_tests .venv-adapters "gem or verifiers or mini_swe_agent" "$@"
install .venv-openenv tests/openenv.txt openenv
run_tests .venv-openenv openenv "$@"
