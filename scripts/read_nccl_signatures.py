#!/usr/bin/env python3
"""Read the signatures of what the nccl transport calls out of a wheel of nccl4py, for the tests' double of it.

With `ast` only: nothing of the wheel is imported or executed. It comes from `pip download --no-deps nccl4py==0.6.0`.

Example: python scripts/read_nccl_signatures.py nccl4py-0.6.0-cp312-cp312-manylinux_2_28_x86_64.whl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # a checkout need not be installed

from vendor_signatures.archives import read
from vendor_signatures.calls import Called
from vendor_signatures.record import dump, signatures_in

OUT = HERE.parent / "tests" / "parallel" / "nccl_signatures.json"
METHODS = ("initialize", "send", "recv", "abort", "get_async_error", "get_last_error")
FUNCTIONS = ("group.group", "utils.get_unique_id", "utils.get_version", "utils.get_error_string")
CALLED = (
    Called("nccl.core.communicator.Communicator", "nccl4py", frozenset(METHODS)),
    Called("nccl.core.utils.UniqueId", "nccl4py", frozenset({"from_bytes", "__bytes__"})),
    *(Called(f"nccl.core.{name}", "nccl4py", frozenset()) for name in FUNCTIONS),
)


def main() -> int:
    assert __doc__ is not None  # noqa: S101 - for the type checker
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel")
    options = parser.parse_args()
    found = signatures_in(read(options.wheel), CALLED)
    dump(OUT, found)
    print("\n".join(f"{entry.callable}: {len(entry.parameters)} parameters" for entry in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
