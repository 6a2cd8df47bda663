"""Composition from a file: one that cannot be read is one fault, and one that was written composes to itself."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import schema
from configs.compose import compose, to_mapping
from configs.schema import AttentionSpec, RunConfig
from tests.configs.composing import BACKEND, composed, refused

# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("run:\n  seed: [1,\n", "not valid YAML at line 3"),
        ("run: {seed: 1}\nrun: {seed: 2}\n", "line 2"),
        ("- 1\n", "does not hold a mapping"),
        ("just text\n", "does not hold a mapping"),
        ("3\n", "Invalid loaded object"),
        ("a: \x01", "unacceptable character"),
        ("a: !!set {x}", "not a supported"),
        ("a: &x [*x]", "recursive"),
        ("a: " + "[" * 3000, "nest"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_fault(written: Any, text: str, rule: str) -> None:
    config, (fault,) = compose([], file=written(text), environ={})
    assert config is None
    assert fault.key == "my.yaml"
    assert rule in fault.rule


def test_a_missing_or_undecodable_file_is_a_fault(tmp_path: Path) -> None:
    assert "No such file" in refused(file=tmp_path / "none.yaml")[0].rule
    assert "cannot be read" in refused(file=tmp_path)[0].rule
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    assert "UTF-8" in refused(file=tmp_path / "latin.yaml")[0].rule


# --- the round trip -------------------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20) | st.text(
    "\\${}'\" :#1e-", max_size=12
)
_LINE = _TEXT.filter(lambda text: text.strip() and text != "???")
_COUNT = st.integers(1, 10**6)
_TIMEOUT = st.floats(min_value=0, max_value=1e6, exclude_min=True)
_POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
_OPTION = _TEXT.filter(lambda text: text != "???") | st.sampled_from(["1e3", "-1_0E+5", "no", "010", "${x}"])
_OPTION |= st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
_FIELD = st.sampled_from(["dtype_qk", "threshold", "backend", "quant", "on"])
_BLOCK = st.none() | st.dictionaries(_FIELD, _OPTION | st.lists(_OPTION, max_size=3), min_size=1, max_size=3)
_SPEC = st.builds(
    AttentionSpec,
    st.sampled_from(["auto", "TORCH_SDPA", "FLASH_ATTN", "no", "null", "${x", "1e3"]),
    version=st.none() | st.integers(1, 9),
    on_unsupported=st.sampled_from(schema.ON_UNSUPPORTED),
    quant=_BLOCK,
    skip_softmax=_BLOCK,
    options=_BLOCK,
)
_ROLE = st.lists(st.sampled_from(["self", "cross", "a_b", "1", "on", "x y"]), min_size=1, max_size=3).map(".".join)
_CONFIGS = st.builds(
    RunConfig,
    model=st.builds(schema.ModelConfig, path=_LINE),
    generate=st.builds(
        schema.GenerateConfig,
        prompt=_LINE,
        negative_prompt=_TEXT.filter(lambda text: text != "???"),
        steps=_COUNT,
        guidance=_POSITIVE,
        guidance_2=st.none() | _POSITIVE,
        flow_shift=st.none() | _POSITIVE,
        frames=_COUNT,
        height=_COUNT,
        width=_COUNT,
        fps=st.integers(1, 1000),
        image=st.none() | _LINE,
    ),
    attention=st.builds(
        schema.AttentionConfig,
        default=st.none() | _SPEC,
        per_role=st.dictionaries(_ROLE, _SPEC, max_size=4),
        register=st.just({}),
        origins=st.just({}),
        agreement=st.sampled_from(schema.AGREEMENTS),
    ),
    parallel=st.builds(schema.ParallelConfig, world_size=st.none() | _COUNT),
    cluster=st.builds(
        schema.ClusterConfig,
        address=st.sampled_from(["local", "10.0.0.1:6379", "[::1]:6379"]),
        start_timeout_s=_TIMEOUT,
        stall_timeout_s=_TIMEOUT,
    ),
    run=st.builds(
        schema.RunSettings,
        seed=st.integers(0, 2**63 - 1),
        dir=st.none() | _LINE,
        dtype=st.sampled_from(schema.DTYPES),
        device=st.sampled_from(schema.DEVICES),
        outputs=st.lists(st.sampled_from(schema.OUTPUTS), unique=True).map(tuple),
        save_latents=st.booleans(),
    ),
)


@given(_CONFIGS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_resolved_configuration_composes_to_itself(tmp_path: Path, config: RunConfig) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_mapping(config), sort_keys=False), encoding="utf-8")
    again, faults = compose(file=file, environ={BACKEND: "OTHER"})
    assert faults == ()
    assert again == config
    assert again is not None
    assert repr(again.attention.default) == repr(config.attention.default)  # 1, 1.0 and True are equal
    assert repr(again.attention.per_role) == repr(config.attention.per_role)


def test_a_configuration_survives_pickling_with_its_origins() -> None:
    config = composed("attention.per_role.a=A", "attention.register.MINE=pkg.mod.Cls")
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.attention.origins == config.attention.origins == {"attention.per_role.a": "command line"}
