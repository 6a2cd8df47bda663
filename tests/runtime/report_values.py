"""Selections and events for the tests of reports, run folders and progress."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema

from backends.requirements import Requirements
from backends.selection import Rejected, Selection
from configs.faults import Fault
from parallel.events import AttentionRan

ROOT = Path(__file__).resolve().parents[2]
MISSING = Fault("packages", None, "the package fa3-fwd is not installed", "run `pip install fa3-fwd`")
SELF = Selection(
    role="self",
    kind="self",
    category="self",
    requirements=Requirements(64, 2, 2, "float32", "self"),
    requested=None,
    backend="TORCH_SDPA",
    variant="torch",
    class_path="backends.declared.torch_sdpa.TorchSDPA",
    source="platform",
    key="",
    origin="",
    exactness="exact",
    rejected=(Rejected("FLASH_ATTN", (MISSING,)),),
)
CROSS = replace(
    SELF,
    role="cross",
    kind="cross",
    category="cross",
    requirements=Requirements(64, 4, 4, "float32", "cross"),
    requested="TORCH_SDPA",
    source="role",
    key="attention.per_role.cross",
    origin="command line",
    rejected=(),
)
FLASH = replace(SELF, backend="FLASH_ATTN", variant="fa3", class_path="backends.declared.flash.Flash", rejected=())


def ran(selection: Selection = SELF, layer: int = 0, **changes: Any) -> AttentionRan:
    event = AttentionRan(
        model="transformer",
        layer=f"blocks.{layer}.{selection.role}",
        selection=selection,
        strategy="local" if selection.kind == "cross" else "ulysses",
        kernel="torch.nn.functional.scaled_dot_product_attention",
        query_rows=(1, 5, 4, 64),
        query=(1, 10, 2, 64),
        key=(1, 10, 2, 64),
    )
    return replace(event, **changes)


def check_schema(name: str, content: Any) -> None:
    schema = json.loads((ROOT / "docs" / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads(json.dumps(content)))
