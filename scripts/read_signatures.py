#!/usr/bin/env python3
"""Read the signatures of what our kernels call out of the vendors' packages, for the tests' doubles.

With `ast` only: nothing of a package is imported or executed. What is read replaces what was read of the same version,
and the rest of the file stays. A wheel or a source distribution comes from `pip download --no-deps`; what is only on
GitHub is ORIGIN:OWNER/NAME=ARCHIVE, with the archive that https://github.com/OWNER/NAME/archive/COMMIT.tar.gz gives and
the origin under which a declaration has it: a distribution, or a repository on the Hugging Face Hub.

Example: python scripts/read_signatures.py flash_attn-2.8.3.tar.gz sageattn3:thu-ml/SageAttention=COMMIT.tar.gz
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # a checkout need not be installed

from vendor_signatures.archives import read
from vendor_signatures.calls import called
from vendor_signatures.record import dump, load, merged, signatures_in

OUT = HERE.parent / "tests" / "backends" / "signatures.json"


def main() -> int:
    assert __doc__ is not None  # noqa: S101 - for the type checker
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", nargs="+", help="a wheel, a source distribution, or ORIGIN:OWNER/NAME=ARCHIVE")
    parser.add_argument("--out", type=Path, default=OUT, help="the file to change (default: %(default)s)")
    options = parser.parse_args()
    every = called()
    entries = load(options.out)
    try:
        for argument in options.archive:
            found = signatures_in(read(argument), every)
            entries = merged(entries, found, every)
            for entry in found:
                print(f"{entry.callable}: {len(entry.parameters)} parameters, {entry.distribution} {entry.version}")
    except (LookupError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    dump(options.out, entries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
