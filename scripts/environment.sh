# Sourced by the other scripts: sets `python` to PYTHON, or to that of a new virtual environment with this checkout installed.
# Usage: source scripts/environment.sh FOLDER EXTRAS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -n ${PYTHON:-} ]]; then
  python=$PYTHON
else
  folder=$1 extras=$2
  base=$(command -v python3.12 || command -v python3.11 || command -v python3)
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "python3=$("$base" --version): Raylysses needs Python 3.11 or newer; name one with PYTHON=" >&2
    exit 3
  }
  echo "Making a virtual environment in $folder with $("$base" --version) (some minutes the first time)"
  rm -rf "$folder"
  "$base" -m venv "$folder"
  python=$folder/bin/python
  # torch first and alone: the pinned release may come as a CPU build, which the resolver must not replace.
  "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
  "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".$extras"
fi
