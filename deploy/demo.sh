#!/usr/bin/env bash
# From a fresh clone to an answer: sets up, fetches SmolLM2-135M-Instruct, starts the lanes and generates.
# The first argument is the prompt; what follows it goes to `speclane generate`.
set -euo pipefail
here=$(dirname "$0")
"$here/setup.sh"
prompt=${1:-"Write a short poem about two processes, then repeat it word for word."}
exec "$here/../.venv/bin/speclane" generate --prompt "$prompt" "${@:2}"
