"""`raylysses`, and `python -m runtime` from a checkout."""

from __future__ import annotations

import sys

from runtime.source import misplaced_imports, shadow_message


def main() -> int:
    misplaced = misplaced_imports()
    for name, path in misplaced:
        value, rule, remedy = shadow_message(name, path)
        print(f"error: import={value}: {rule}; {remedy}", file=sys.stderr)
    if misplaced:
        return 2
    from runtime.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
