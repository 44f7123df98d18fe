# The same steps as CI, one by one. `just --list` shows them.

bin := ".venv/bin"

setup:
    deploy/setup.sh

# form, types, layers
check: setup
    {{bin}}/ruff format --check .
    {{bin}}/ruff check .
    {{bin}}/mypy
    PATH="$PWD/{{bin}}:$PATH" lint-imports

# all that runs without a GPU in minutes
test *args:
    deploy/test.sh {{args}}

faults: setup
    {{bin}}/pytest tests/faults

slow: setup
    {{bin}}/pytest -m slow

test-gpu: setup
    {{bin}}/pytest -m gpu

bench: setup
    {{bin}}/speclane bench overhead --batch 1
    {{bin}}/speclane bench overhead --batch 64
    {{bin}}/speclane bench decode
