#!/usr/bin/env bash
# Installs what `make` needs and is not there yet:
#   setup.sh venv             .venv, from $PYTHON or any Python 3.11
#   setup.sh bazel [COMMAND]  Bazel, from Debian's packages
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    echo "error: $*" >&2
    exit 2
}

install_packages() {
    local as_root=()
    command -v apt-get > /dev/null || die "the Debian packages $* are needed, and there is no apt-get here."
    if [[ $(id -u) != 0 ]]; then
        command -v sudo > /dev/null || die "the Debian packages $* are needed. As root, run: apt-get install $*"
        as_root=(sudo)
    fi
    echo "Installing the Debian packages $*"
    "${as_root[@]}" apt-get update --quiet
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends "$@"
}

is_python_3_11() {
    "$1" -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))" 2> /dev/null
}

find_python() {
    local candidate
    for candidate in python3.11 python3 /usr/bin/python3.11; do
        if is_python_3_11 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

set_up_venv() {
    local python=${PYTHON:-}
    if [[ -n $python ]]; then
        is_python_3_11 "$python" || die "PYTHON=$python is not Python 3.11, which the pinned packages are for."
    elif ! python=$(find_python); then
        install_packages python3.11 python3.11-venv ||
            die "no Python 3.11 was found. Install one and name it: make PYTHON=/path/to/python3.11 ..."
        python=/usr/bin/python3.11
    fi
    "$python" -c "import ensurepip" 2> /dev/null || install_packages python3.11-venv
    # Without the stamp an earlier set-up was interrupted and may have left packages half written. What it downloaded is
    # in pip's cache.
    [[ -e .venv/.complete ]] || "$python" -m venv --clear .venv
    rm -f .venv/.complete
    .venv/bin/python -m pip install --disable-pip-version-check --require-hashes --only-binary=:all: \
        --requirement requirements.txt
    touch .venv/.complete
}

set_up_bazel() {
    local command=${1:-bazel}
    command -v "$command" > /dev/null || install_packages bazel-bootstrap
}

case ${1:-} in
    venv) set_up_venv ;;
    bazel) set_up_bazel "${@:2}" ;;
    *) die "usage: tools/setup.sh venv | bazel [COMMAND]" ;;
esac
