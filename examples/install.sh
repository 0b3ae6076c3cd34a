# Sourced by quickstart.sh and tests/run.sh: makes .venv in the checkout, installs rl2 with the extra named by $1 at the
# versions of constraints.txt, and activates it. Nothing is done twice.
if [ ! -x .venv/bin/python ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "rl2 needs Python 3.11 or later: set PYTHON=/path/to/python3.11 (now: $("${PYTHON:-python3}" --version))" >&2
        exit 1
    }
    "${PYTHON:-python3}" -m venv .venv
fi
source .venv/bin/activate
wanted="$(cat setup.py constraints.txt | cksum) $1"
if ! grep -qxF "$wanted" .venv/installed 2>/dev/null; then
    echo "installing rl2[$1] into .venv (a minute or two) ..."
    # torch first and by its exact version, which lets pip take a CPU build where one is at hand.
    python -m pip install -qq -c constraints.txt "$(grep '^torch==' constraints.txt)"
    python -m pip install -qq -c constraints.txt -e ".[$1]"
    echo "$wanted" >>.venv/installed
fi
