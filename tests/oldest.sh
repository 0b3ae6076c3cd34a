#!/usr/bin/env bash
# The tests that touch transformers, once more with the oldest release of it that SGLang (0.5.15 to 0.5.21) pins: makes
# .venv-oldest from constraints.txt with that one exchanged, in a few minutes, once. bash tests/oldest.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-oldest oldest=transformers==5.12.1
wanted="$(cat tests/oldest.sh setup.py constraints.txt | cksum)"
if ! grep -qxF "$wanted" "$env/installed" 2>/dev/null; then
    echo "installing rl2[test] with $oldest into $env (a few minutes) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    # It takes older ones of these two as well.
    { grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt; echo "$oldest"; } >"$env/constraints.txt"
    pip() { "$env/bin/python" -m pip install -qq -c "$env/constraints.txt" "$@"; }
    pip "$(grep '^torch==' constraints.txt)"
    pip -e ".[test]"
    echo "$wanted" >"$env/installed"
fi
files=(tests/test_{model,chat,data,engine,worker,lora,checkpoint,rollout,trainer,examples}.py)
OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -x -q --durations=10 "${files[@]}" "$@"
