#!/usr/bin/env bash
# From a fresh clone to a verdict: sets up, checks form, types and layers, then runs the tests.
# Arguments go to pytest, for example `deploy/test.sh tests/unit -k sampler`. WORKERS is how many files of them run at once.
set -euo pipefail
cd "$(dirname "$0")/.."
deploy/setup.sh
bin=.venv/bin
"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/mypy"
PATH="$PWD/$bin:$PATH" lint-imports
"$bin/pytest" -n "${WORKERS:-2}" --dist loadfile -m "not gpu and not slow" "$@"
