# Source this file. It makes .venv in the checkout, installs rl2 with the extra $1 at the versions of constraints.txt, and
# activates it. It installs again only if setup.py or constraints.txt has changed.
if [ ! -x .venv/bin/python ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "rl2 needs Python 3.11 or later: set PYTHON=/path/to/python3.11 (now: $("${PYTHON:-python3}" --version))" >&2
        exit 1
    }
    "${PYTHON:-python3}" -m venv .venv
fi
source .venv/bin/activate
fingerprint="$(cat setup.py constraints.txt | cksum) $1"
if ! grep -qxF "$fingerprint" .venv/installed 2>/dev/null; then
    echo "installing rl2[$1] into .venv (a minute or two) ..."
    # torch comes first, with its exact version, so that pip can take a CPU build if there is one.
    python -m pip install -qq -c constraints.txt "$(grep '^torch==' constraints.txt)"
    python -m pip install -qq -c constraints.txt -e ".[$1]"
    echo "$fingerprint" >>.venv/installed
fi
