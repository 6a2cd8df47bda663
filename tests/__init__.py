"""The scripts' modules can be imported wherever the tests can, in Ray's workers, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
