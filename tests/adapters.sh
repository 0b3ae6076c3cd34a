#!/usr/bin/env bash
# The adapters of envs/ to GEM and verifiers with the real packages: makes .venv-adapters (1.6 GB, a minute or two, once) and runs the
# tests that need them. A test that is skipped fails the suite. bash tests/adapters.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-adapters
fingerprint="$(cat tests/adapters.* setup.py constraints.txt | cksum)"
if ! grep -qxF "$fingerprint" "$env/installed" 2>/dev/null; then
    echo "installing rl2 with GEM and verifiers into $env (a minute or two) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    { grep -vE '^(anthropic|mcp|mcp-types|openai)==' constraints.txt; cat tests/adapters.txt; } >"$env/constraints.txt"
    pip() { "$env/bin/python" -m pip install -qq -c "$env/constraints.txt" "$@"; }
    pip "$(grep '^torch==' constraints.txt)"
    pip pytest reasoning-gym verifiers -e .
    pip --no-deps gem-llm # it asks for old releases of what it needs
    echo "$fingerprint" >"$env/installed"
fi
OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -x -q -rs --durations=5 --junitxml="$env/report.xml" \
    tests/test_ready_envs.py -k "gem or verifiers" "$@"
grep -q ' skipped="0"' "$env/report.xml" || {
    echo "a test was skipped: see above which package is missing" >&2
    exit 1
}
