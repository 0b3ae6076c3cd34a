#!/usr/bin/env bash
# Builds the documentation as a site, build/site/index.html. A broken link, or a page that is missing in mkdocs.yml, fails.
# bash tests/site.sh [mkdocs arguments, such as serve]
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-site
wanted="$(cksum <tests/site.sh)"
if ! grep -qxF "$wanted" "$env/installed" 2>/dev/null; then
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    "$env/bin/python" -m pip install -qq mkdocs==1.6.1 mkdocs-material==9.8.2
    echo "$wanted" >"$env/installed"
fi
export NO_MKDOCS_2_WARNING=1
if (($#)); then
    exec "$env/bin/mkdocs" "$@"
fi
output="$("$env/bin/mkdocs" build --strict 2>&1)" || { echo "$output" >&2; exit 1; }
echo "the site is in build/site"
