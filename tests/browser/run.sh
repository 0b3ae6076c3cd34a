#!/usr/bin/env bash
# The report in a real Chromium: installs Debian's package if there is none (as root), makes .venv-browser and runs the tests.
# bash tests/browser/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
find_browser() { command -v chromium || command -v google-chrome || true; }
if [ -z "$(find_browser)" ]; then
    [ "$(id -u)" = 0 ] || { echo "these tests need Chromium: apt-get install chromium" >&2; exit 1; }
    apt-get update -qq && apt-get install -y -qq chromium >/dev/null
fi
env=.venv-browser
wanted="$(cat tests/browser/run.sh constraints.txt | cksum)"
if ! grep -qxF "$wanted" "$env/installed" 2>/dev/null; then
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    # Playwright's own browsers are not downloaded. Of the packages of rl2 the report needs two.
    "$env/bin/python" -m pip install -qq -c constraints.txt playwright==1.65.2 pytest pyyaml safetensors
    echo "$wanted" >"$env/installed"
fi
CHROMIUM="$(find_browser)" PYTHONPATH=. "$env/bin/python" -m pytest -x -q --durations=5 tests/browser "$@"
