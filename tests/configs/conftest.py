"""The file of a user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes my.yaml into the working directory; its path is relative, as a user would give it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("my.yaml").write_text(text, encoding="utf-8")
        return Path("my.yaml")

    return write
