"""`raylysses`, and `python -m runtime` from a checkout."""

from __future__ import annotations

import os
import sys

from runtime.source import misplaced_imports, shadow_message


def main() -> int:
    misplaced = misplaced_imports()
    for name, path in misplaced:
        value, rule, remedy = shadow_message(name, path)
        print(f"error: import={value}: {rule}; {remedy}", file=sys.stderr)
    if misplaced:
        return 2
    # The `raylysses` command has its own folder on the path, not the working directory, where a user's backend may be.
    # Last, so that nothing there stands in for what is installed.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    from runtime.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
