"""`raylysses`, and `python -m runtime` from a checkout."""

from __future__ import annotations

import os
import signal
import sys

from runtime.source import misplaced_imports, missing_requirements, requirements_message, shadow_message

EXIT_LIMIT_S = 4.0


def main() -> int:
    misplaced = misplaced_imports()
    for name, path in misplaced:
        value, rule, remedy = shadow_message(name, path)
        print(f"error: import={value}: {rule}; {remedy}", file=sys.stderr)
    if misplaced:
        return 2
    missing = missing_requirements()
    if missing:
        print(f"error: {requirements_message(missing)}", file=sys.stderr)
        return 2
    # The `raylysses` command has its own folder on the path, not the working directory, where a user's backend may be.
    # Last, so that nothing there stands in for what is installed.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    from runtime.signals import ExitWatch, SignalInterrupt, signal_message

    watch = ExitWatch(EXIT_LIMIT_S)
    watch.start()
    try:
        from runtime.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt as error:  # during the imports
        signum = error.signum if isinstance(error, SignalInterrupt) else signal.SIGINT
        print(f"error: {signal_message(signum)}", file=sys.stderr)
        code = 128 + signum
    if watch.signum is not None:
        watch.exit(code)  # the exit handlers of Ray may wait for processes that the signal has ended
    return code


if __name__ == "__main__":
    sys.exit(main())
