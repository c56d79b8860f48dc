#!/bin/sh
# Makes the virtual environment $1. Debian and Ubuntu ship Python without venv: installs it if no password is needed,
# otherwise prints the command.
set -eu
venv=$1
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "outrider: $("$python" --version 2>&1) found; Python 3.11 or newer is needed. Try: make PYTHON=python3.11" >&2
    exit 1
fi
[ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && exit 0
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    as_root=
    [ "$(id -u)" = 0 ] || as_root="sudo -n"
    if ! { $as_root apt-get update -qq && $as_root apt-get install -y -qq "python$version-venv"; }; then
        echo "outrider: this Python has no venv. Run: sudo apt-get install python$version-venv" >&2
        exit 1
    fi
fi
exec "$python" -m venv "$venv"
