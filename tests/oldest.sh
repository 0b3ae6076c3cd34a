#!/usr/bin/env bash
# Runs the tests that touch transformers with the oldest release of it that SGLang pins (0.5.15 to 0.5.21). The first call makes
# .venv-oldest from constraints.txt with that release, in a few minutes. bash tests/oldest.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-oldest oldest=transformers==5.12.1
fingerprint="$(cat tests/oldest.sh setup.py constraints.txt | cksum)"
if ! grep -qxF "$fingerprint" "$env/installed" 2>/dev/null; then
    echo "installing rl2[test] with $oldest into $env (a few minutes) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    # The oldest release needs older releases of these two as well: pip chooses them.
    { grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt; echo "$oldest"; } >"$env/constraints.txt"
    pip() { "$env/bin/python" -m pip install -qq -c "$env/constraints.txt" "$@"; }
    pip "$(grep '^torch==' constraints.txt)"
    pip -e ".[test]"
    echo "$fingerprint" >"$env/installed"
fi
files=(tests/test_{model,chat,templates,data,engine,worker,lora,checkpoint,rollout,env_objects,trainer,examples}.py)
OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -x -q --durations=10 "${files[@]}" "$@"
