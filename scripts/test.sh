#!/usr/bin/env bash
# Makes a new virtual environment, installs Raylysses with its development tools, and runs every check and test.
# PYTHON=/path/to/python uses an existing environment instead. Further arguments go to pytest: bash scripts/test.sh -k plan
# tests/parallel/suite --calls 20000 --calls-seed 7 draws more attention calls over live ranks than usual, and others.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" .venv-test "[dev]"
export RAY_AUTH_MODE=disabled  # a local test cluster needs no token, and must not leave one in the user's home
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" -c 'import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())'
"$python" -m pytest "$@"
