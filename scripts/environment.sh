# Sourced by the other scripts: sets `python` to PYTHON, or to that of a virtual environment with this checkout installed.
# Usage: source scripts/environment.sh FOLDER EXTRAS [keep]   keep: one that was made of the same files is good enough.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# What an environment was made of: it holds absolute paths, and links to the Python beneath.
ingredients() { "$1" --version && "$1" -c 'import sys; print(sys.base_prefix)' && pwd && cat pyproject.toml constraints.txt; }

if [[ -n ${PYTHON:-} ]]; then
  python=$PYTHON
else
  folder=$1 extras=$2 keep=${3:-} base=
  for candidate in python3 python3.13 python3.12 python3.11; do
    new_enough "$candidate" || continue
    # The one beneath an environment that is active, which may be the one that is made anew.
    base=$("$candidate" -c 'import sys; print(sys._base_executable)')
    new_enough "$base" || base=$candidate
    break
  done
  if [[ -z $base ]]; then
    echo "PYTHON=: no Python 3.11 or newer is on the path; name one: PYTHON=/path/to/python bash $0" >&2
    exit 3
  fi
  python=$folder/bin/python
  if [[ $keep != keep ]] || ! ingredients "$base" | cmp -s - "$folder/made-of"; then
    echo "Making a virtual environment in $folder with $("$base" --version); this takes some minutes"
    rm -rf "$folder"
    "$base" -m venv "$folder"
    # torch first and alone: its pinned release may be at hand as a CPU build, which the resolver must not replace.
    "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
    "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".$extras"
    ingredients "$base" >"$folder/made-of"
  fi
fi
