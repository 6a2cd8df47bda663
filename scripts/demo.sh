#!/usr/bin/env bash
# Makes a virtual environment with Raylysses, generates a video over two ranks, and says where it is.
# PYTHON=/path/to/python uses an existing environment instead. Further arguments are settings: bash scripts/demo.sh run.seed=7
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" .venv-demo "" keep
"$python" -m runtime generate --prompt "a red circle moving right" "$@"
