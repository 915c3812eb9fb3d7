#!/usr/bin/env bash
# Installs what `make` needs and is not there yet:
#   setup.sh venv             .venv with requirements.txt, from $PYTHON or any Python 3.11
#   setup.sh venv dev         the same with requirements-dev.txt, too
#   setup.sh bazel [COMMAND]  Bazel, from Debian's packages
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    echo "error: $*" >&2
    exit 2
}

usage() {
    die "usage: tools/setup.sh venv [dev] | bazel [COMMAND]"
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

# Training on CPU cores is faster with it, and works without: no password is asked for.
install_jemalloc() {
    [[ ! -e /usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2 ]] && command -v apt-get > /dev/null || return 0
    [[ $(id -u) == 0 ]] || sudo --non-interactive true 2> /dev/null || return 0
    (install_packages libjemalloc2) || echo "libjemalloc2 could not be installed; nothing else needs it."
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
    local python=${PYTHON:-} requirements=requirements.txt stamps=(.venv/.complete) compile=true
    case ${1:-} in
        # Python compiles the modules that it imports; compiling all of them takes half a minute.
        "") compile=false ;;
        # Bazel's sandbox cannot keep what Python compiles there.
        dev) requirements=requirements-dev.txt stamps+=(.venv/.complete-dev) ;;
        *) usage ;;
    esac
    if [[ -n $python ]]; then
        is_python_3_11 "$python" || die "PYTHON=$python is not Python 3.11, which the pinned packages are for."
    elif ! python=$(find_python); then
        install_packages python3.11 python3.11-venv ||
            die "no Python 3.11 was found. Install one and name it: make PYTHON=/path/to/python3.11 ..."
        python=/usr/bin/python3.11
    fi
    "$python" -c "import ensurepip" 2> /dev/null || install_packages python3.11-venv
    install_jemalloc
    # Without the stamp an earlier set-up was interrupted and may have left packages half written. What it downloaded is
    # in pip's cache.
    [[ -e .venv/.complete ]] || "$python" -m venv --clear .venv
    rm -f .venv/.complete .venv/.complete-dev
    .venv/bin/python -m pip install --disable-pip-version-check --require-hashes --only-binary=:all: --no-compile \
        --requirement "$requirements"
    # pip would use one core.
    if $compile; then .venv/bin/python -m compileall -q -j 0 .venv/lib; fi
    touch "${stamps[@]}"
}

set_up_bazel() {
    local command=${1:-bazel}
    command -v "$command" > /dev/null || install_packages bazel-bootstrap
}

case ${1:-} in
    venv) set_up_venv "${@:2}" ;;
    bazel) set_up_bazel "${@:2}" ;;
    *) usage ;;
esac
