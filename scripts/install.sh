#!/usr/bin/env bash
# Make .venv, or bring it up to date: the locked dependencies and echelon itself, editable.
#
#   scripts/install.sh        called by every make target; done in a moment when nothing changed
#
# .venv/.stamp, written last, says what the environment was made from: the lock, pyproject.toml
# and its own place (a moved environment does not work). .venv/.installing exists while this
# script is at work, so an environment that was interrupted half-way is noticed and made anew.
# An environment that someone made by hand has neither and is brought up to the lock.
#
# PYTHON=… chooses the interpreter. TORCH_ARGS=… is handed to pip for torch alone, for example
# to name the index of PyTorch's CPU builds where the default one would bring CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# shellcheck source=scripts/python.sh
. scripts/python.sh

started=$SECONDS
say() { echo "venv: $*"; }

wanted() {
    cksum requirements.lock pyproject.toml scripts/install.sh
    pwd -P
}

if [ -f .venv/.stamp ] && [ ! -e .venv/.installing ] && [ "$(cat .venv/.stamp)" = "$(wanted)" ] &&
    [ -x .venv/bin/python ]; then
    exit 0
fi

# Whether .venv is an environment that works, made here and with a new enough Python.
usable() {
    [ ! -e .venv/.installing ] || { say "the last installation was interrupted"; return 1; }
    .venv/bin/python -c '
import os, sys
here = os.path.realpath(sys.prefix) == os.path.realpath(".venv")
sys.exit(not here or sys.version_info < (3, 11))
' > /dev/null 2>&1 || { say ".venv is broken, was moved here, or its Python is too old"; return 1; }
    [ ! -f .venv/.stamp ] || [ "$(tail -n 1 .venv/.stamp)" = "$(pwd -P)" ] ||
        { say ".venv was made elsewhere"; return 1; }
}

if [ -e .venv ] && ! usable; then
    say "making it anew"
    rm -rf .venv
fi
if [ -e .venv ]; then
    say "bringing .venv up to requirements.lock"
    touch .venv/.installing
else
    python=$(find_python)
    say "creating .venv with $("$python" --version) (once; takes a minute or two)"
    mkdir .venv
    touch .venv/.installing
    "$python" -m venv .venv
fi

install() {
    # Twice quiet: errors only. pip otherwise warns about every index a machine is configured with.
    if ! .venv/bin/python -m pip install --quiet --quiet "$@"; then
        say "installing failed (above); .venv will be made anew next time" >&2
        exit 1
    fi
}

torch=$(grep '^torch==' requirements.lock)
say "$torch, before everything else"
# shellcheck disable=SC2086 # several arguments are meant to become several words
install ${TORCH_ARGS:-} "$torch"
say "$(grep -vc '^#' requirements.lock) packages of requirements.lock"
install --requirement requirements.lock
say "echelon itself"
# The build tool is in the lock: nothing is fetched, and the build is the same everywhere.
install --no-deps --no-build-isolation --editable .
if ! broken=$(.venv/bin/python -m pip check 2>&1); then
    say "the installed packages do not fit together:" >&2
    echo "$broken" >&2
    exit 1
fi

rm -f .venv/.installing
wanted > .venv/.stamp
say "ready after $((SECONDS - started)) s"
