#!/usr/bin/env bash
# What pip installs is complete: builds the source distribution and, from it, the wheel, checks both with twine, installs the wheel into
# an empty environment and trains from an empty folder. The first call makes .venv-wheel with build and twine. bash tests/package.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh test
tools=.venv-wheel
fingerprint="$(cat tests/package.* constraints.txt | cksum)"
if ! grep -qxF "$fingerprint" "$tools/installed" 2>/dev/null; then
    echo "installing build and twine into $tools ..."
    [ -x "$tools/bin/python" ] || "${PYTHON:-python3}" -m venv "$tools"
    cat constraints.txt tests/package.txt >"$tools/constraints.txt"
    "$tools/bin/python" -m pip install -qq -c "$tools/constraints.txt" build twine
    echo "$fingerprint" >"$tools/installed"
fi

root=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$tools/bin/python" -m build -o "$folder/dist" >"$folder/log" 2>&1 || {
    tail -n 40 "$folder/log" >&2
    exit 1
}
"$tools/bin/python" -m twine --no-color check --strict "$folder"/dist/*

# The environment gets the packages of .venv by their path, so that none is installed again. Files that make other paths known, as that of
# an rl2 in a checkout, have no effect there.
python -m venv --without-pip "$folder/env"
python -m pip --python "$folder/env/bin/python" install -q --no-deps --no-index "$folder"/dist/*.whl
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
source "$folder/env/bin/activate"
echo "$packages" >"$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"

mkdir "$folder/empty"
cd "$folder/empty"
export OMP_NUM_THREADS=1
PYTHONPATH="$root/tests" python "$root/tests/package.py" "$root"
rl2 --version
rl2 env arithmetic data.path=rows.jsonl
rl2 ppo data.path=rows.jsonl rollout.env_path=arithmetic actor.model_name=tiny data.prompts_per_rollout=2 data.responses_per_prompt=2 \
    rollout.train_sampling_params.max_new_tokens=4 trainer.max_steps=2 trainer.experiment_name=first
python -c '
import rl2
run = rl2.train("sft", rows="talks.jsonl", model_name="runs/first/model", data={"batch_size": 1}, trainer={"max_steps": 2})
assert len(run.metrics) == 2 and (run.path / "report.html").exists()
'
echo "the wheel is complete"
