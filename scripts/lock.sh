#!/usr/bin/env bash
# Write requirements.lock and requirements-vendors.lock: the exact versions of everything.
#
#   scripts/lock.sh
#
# 1. A fresh virtual environment in a temporary directory, so that nothing of this machine's
#    own environments gets in.
# 2. torch first, at its pinned version: resolved together with the rest it drags in gigabytes
#    of CUDA on some platforms.
# 3. The package with its development tools, and what builds it; `pip freeze` is the lock.
# 4. The data vendors on top, held to that lock; what they add is the second lock.
#
# The files hold names and versions only: no paths, no addresses, no echelon, no pip. torch loses
# its build label (2.13.0+cpu → 2.13.0), and the CUDA packages that some builds bring are left to
# torch itself, so that one lock serves every platform.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# shellcheck source=scripts/python.sh
. scripts/python.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

torch=$(sed -n 's/^ *"\(torch==[^"]*\)",$/\1/p' pyproject.toml)
build=$(sed -n 's/^requires = \["\(setuptools[^"]*\)"\]$/\1/p' pyproject.toml)
if [ -z "$torch" ] || [ -z "$build" ]; then
    echo "pyproject.toml no longer pins torch or names setuptools where this script looks" >&2
    exit 1
fi

# Names and versions of what is installed, in the lock's form.
frozen() {
    "$work/venv/bin/python" -m pip freeze --all --exclude-editable --exclude pip --exclude echelon |
        sed -e 's/^torch @ .*/'"$torch"'/' -e 's/^\(torch==[^+]*\)+.*/\1/' |
        grep -viE '^(nvidia-|triton==|cuda-)' |
        LC_ALL=C sort -f
}

refuse_addresses() {
    if grep -nE '://| @ |^-' "$1"; then
        echo "$1: the lines above are not name==version; the lock was not written" >&2
        exit 1
    fi
}

python=$(find_python)
echo "lock: $($python --version) in a fresh environment"
"$python" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip install --quiet --quiet)
echo "lock: $torch, before everything else"
"${pip[@]}" "$torch"
echo "lock: echelon[dev] and $build"
"${pip[@]}" --upgrade "$build"
"${pip[@]}" "$torch" ".[dev]"
frozen > "$work/lock"
refuse_addresses "$work/lock"

echo "lock: echelon[vendors] on top"
"${pip[@]}" --constraint "$work/lock" ".[dev,vendors]"
"$work/venv/bin/python" -m pip check
frozen > "$work/all"
LC_ALL=C comm -13 <(LC_ALL=C sort "$work/lock") <(LC_ALL=C sort "$work/all") |
    LC_ALL=C sort -f > "$work/vendors"
refuse_addresses "$work/vendors"

{
    echo "# Exact versions of echelon's dependencies and development tools. Made by scripts/lock.sh."
    cat "$work/lock"
} > requirements.lock
{
    echo "# What the data vendors add to requirements.lock. Made by scripts/lock.sh."
    cat "$work/vendors"
} > requirements-vendors.lock
echo "lock: $(grep -vc '^#' requirements.lock) packages, $(grep -vc '^#' requirements-vendors.lock) more for the vendors"
