#!/usr/bin/env bash
# Makes .venv in this checkout and installs speclane with its tools there. Does nothing the second time.
# PYTHON names another interpreter than python3; TORCH another requirement than the one below.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "speclane needs Python 3.11 or newer; name one with PYTHON=python3.12 $0" >&2
  exit 2
fi
stamp=.venv/installed-$(cat pyproject.toml - <<<"$torch" | cksum | cut -d ' ' -f 1)
if [ ! -e "$stamp" ]; then
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  # torch first and by itself: its version decides which builds of everything else fit.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "$torch"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
  touch "$stamp"
fi
