# shellcheck shell=bash
# Sourced by the other scripts: find a Python that can make our virtual environment.

# Print the command of the first interpreter that is new enough and can make environments.
# 3.11 comes first because the lock is made with it; PYTHON, where set, is the only candidate.
find_python() {
    local candidate seen=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        # A command may exist and still not run (a version manager's shim), hence the trial.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            > /dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
        seen="$seen $candidate"
    done
    {
        echo "echelon needs Python 3.11 or newer with its venv and ensurepip modules; tried:$seen"
        echo "Install one (Debian and Ubuntu: apt-get install python3 python3-venv), or name it:"
        echo "    make venv PYTHON=/path/to/python3.11"
    } >&2
    return 1
}
