"""Write a tiny Wan diffusers folder with random weights, for trials and tests without a download."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a checkout need not be installed

from wan_folder import TINY_WAN, WanFolderSpec, build

EXAMPLE = """example:
  python scripts/build_tiny_wan.py /tmp/tiny-wan --seed 1 --layers 8
  raylysses generate --prompt "a red circle" model.path=/tmp/tiny-wan
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write; it is made if absent")
    parser.add_argument("--seed", type=int, default=0, help="the weights' seed (default: 0)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the transformer (default: 4)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads of size 64 (default: 4)")
    parser.add_argument("--force", action="store_true", help="write into a folder that has files; others stay")
    return parser


def _sized(spec: WanFolderSpec, *, layers: int, heads: int) -> WanFolderSpec:
    sizes = {"num_layers": layers, "num_attention_heads": heads}
    return dataclasses.replace(spec, transformer={**spec.transformer, **sizes})


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("layers", "heads"):
        value = getattr(options, name)
        if value < 1:
            parser.error(f"--{name}={value}: it takes 1 or more")
    folder: Path = options.folder
    try:
        if folder.is_dir() and any(folder.iterdir()) and not options.force:
            parser.error(f"{folder}: the folder is not empty; give another, or --force to write into it")
        folder.mkdir(parents=True, exist_ok=True)
        build(folder, seed=options.seed, spec=_sized(TINY_WAN, layers=options.layers, heads=options.heads))
    except OSError as error:
        parser.error(f"{folder}: cannot be written: {error.strerror or error}")
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
