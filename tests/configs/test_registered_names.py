"""Names of registered backends are case-sensitive, and no two may differ by case alone."""

from __future__ import annotations

import pytest

from backends.registry import Registry
from configs.faults import FaultError
from configs.schema import AttentionConfig
from parallel.models.names import name_faults
from tests.configs.composing import refused

TORCH_SDPA = "backends.declared.torch_sdpa.TorchSdpaBackend"


def test_two_registered_names_that_differ_by_case_alone_are_refused() -> None:
    (fault,) = refused("attention.register.mine=a.B", "attention.register.MINE=a.B")
    assert str(fault) == (
        "attention.register.MINE: differs from mine by upper and lower case alone; rename one of the two"
    )
    with pytest.raises(FaultError, match="differs from mine by upper and lower case alone"):
        AttentionConfig(register={"mine": "a.B", "MINE": "a.B"})


def test_a_registered_name_that_differs_from_a_known_one_by_case_alone_is_refused() -> None:
    config = AttentionConfig(register={"torch_sdpa": TORCH_SDPA})
    rules = [fault.rule for fault in name_faults(config, {}, Registry(config.register))]
    assert "differs from TORCH_SDPA by upper and lower case alone" in rules
    same = AttentionConfig(register={"TORCH_SDPA": TORCH_SDPA})
    assert name_faults(same, {}, Registry(same.register)) == []
