"""What tests say at the end of a run."""

import pytest

LINES = pytest.StashKey[list[str]]()
