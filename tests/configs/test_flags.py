"""Attention options as serving engines spell them: the same settings as overrides, and the same faults."""

import pytest

from configs.compose import compose
from configs.faults import Fault
from configs.flags import Flag, split
from configs.schema import AttentionConfig, AttentionSpec
from tests.runtime.command import raylysses

PROMPT = "generate.prompt=x"


def attention(*words: str, environ: dict[str, str] | None = None) -> AttentionConfig:
    config, faults = compose([PROMPT, *words], environ=environ or {})
    assert config is not None, faults
    return config.attention


def faults_of(*words: str) -> tuple[Fault, ...]:
    config, faults = compose([PROMPT, *words], environ={})
    assert config is None
    return faults


@pytest.mark.parametrize(
    "words",
    [
        ("--attention-backend", "REFERENCE"),
        ("--attention-backend=REFERENCE",),
        ("--attention-config.backend", "REFERENCE"),
        ("--attention-config.backend=REFERENCE",),
        ("--attention-config.default", "REFERENCE"),
        ("-ac.backend", "REFERENCE"),
        ("-ac.default.backend", "REFERENCE"),
        ("-ac", '{"backend": "REFERENCE"}'),
        ('--attention-config={"default": "REFERENCE"}',),
        ("-ac", '{"default": {"backend": "REFERENCE"}}'),
        ("attention.default=REFERENCE",),
    ],
)
def test_every_spelling_of_the_default_is_the_same_setting(words: tuple[str, ...]) -> None:
    assert attention(*words).default == AttentionSpec("REFERENCE")
    assert attention(*words).origins == {"attention.default": "command line"}
    lower = attention(*words, environ={"DIFFUSION_ATTENTION_BACKEND": "TORCH_SDPA"})
    assert lower.default == AttentionSpec("REFERENCE")


@pytest.mark.parametrize(
    "words",
    [
        ("-ac.per_role.cross.backend", "REFERENCE", "-ac.per_role.self=TORCH_SDPA"),
        ("-ac", '{"per_role": {"cross": {"backend": "REFERENCE"}, "self": "TORCH_SDPA"}}'),
        ("--attention-config.per_role", "{self: TORCH_SDPA, cross: REFERENCE}"),
        ("attention.per_role.self=TORCH_SDPA", "-ac.per_role.cross", "REFERENCE"),
        ("-ac", '{"per_role.cross": "REFERENCE"}', "-ac", '{"per_role.self": "TORCH_SDPA"}'),
    ],
)
def test_spellings_of_different_keys_merge_in_any_order(words: tuple[str, ...]) -> None:
    expected = {"self": AttentionSpec("TORCH_SDPA"), "cross": AttentionSpec("REFERENCE")}
    assert attention(*words).per_role == expected
    assert attention("--attention-backend", "CUDNN_ATTN", *words).per_role == expected


@pytest.mark.parametrize(
    "words",
    [
        ("-ac.backend", "REFERENCE", "attention.default=TORCH_SDPA"),
        ("-ac.backend", "REFERENCE", "-ac", '{"default": "TORCH_SDPA"}'),
        ("--attention-backend", "REFERENCE", "--attention-backend", "TORCH_SDPA"),
        ("-ac", '{"default": "TORCH_SDPA", "backend": "REFERENCE"}'),
    ],
)
def test_two_spellings_of_one_key_with_different_values_are_a_fault_naming_both(words: tuple[str, ...]) -> None:
    (fault,) = faults_of(*words)
    assert fault.key == "attention.default"
    assert "REFERENCE" in fault.rule
    assert "TORCH_SDPA" in fault.rule
    assert attention("-ac.backend", "REFERENCE", "attention.default=REFERENCE").default == AttentionSpec("REFERENCE")


@pytest.mark.parametrize("value", ["REFERENCE", "TORCH_SDPA", "auto"])
@pytest.mark.parametrize(
    "other",
    [
        "-ac.backend {}",
        "-ac.default.backend {}",
        '-ac {{"default": "{}"}}',
        '-ac {{"backend": "{}", "version": 4}}',
        "attention.default={}",
        "attention.default.backend={}",
        "attention.default={{backend: {}}}",
    ],
)
def test_the_short_option_stands_alone_even_beside_an_equal_default(other: str, value: str) -> None:
    words = other.format(value).split(" ", 1) if other.startswith("-") else [other.format(value)]
    faults = faults_of("--attention-backend", "REFERENCE", *words)
    fault = next(fault for fault in faults if fault.key == "--attention-backend")
    assert fault.value == "REFERENCE"
    assert f"mutually exclusive with {other.format(value)}" in fault.rule


def test_the_short_option_goes_with_itself_and_with_other_keys() -> None:
    short = ("--attention-backend", "REFERENCE")
    assert attention(*short, *short).default == AttentionSpec("REFERENCE")
    assert attention(*short, "-ac.per_role.self", "TORCH_SDPA").default == AttentionSpec("REFERENCE")
    both = attention(*short, "-ac.version", "4", "attention.default.options.x=1")
    assert both.default == AttentionSpec("REFERENCE", version=4, options={"x": 1})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--attention-backend",), "--attention-backend: has no value; write --attention-backend TORCH_SDPA"),
        (("-ac",), "-ac: has no value"),
        (("-ac", "FLASH_ATTN"), "for one backend, --attention-backend FLASH_ATTN"),
        (("-ac", "[1]"), "-ac=[1]: is not a mapping"),
        (
            ("--attention-backend.self", "TORCH_SDPA"),
            "write --attention-backend NAME, or --attention-config.self VALUE",
        ),
        (("-ac.bakend", "REFERENCE"), "attention.bakend=REFERENCE: no such key"),
        (("-ac..backend", "REFERENCE"), "is not names joined by dots"),
        (("-ac.backend", "REFERENCE,TORCH_SDPA"), "is a sweep"),
        (("-ac.per_role", "{self: "), "-ac.per_role={self: "),
        (("-ac", '{"per_role": "REFERENCE"}'), "is a mapping from roles to backends"),
        (("-ac", '{"default": "A", "default": "B"}'), "it has the key 'default' twice"),
        (("-ac", '{"per_role": {"a": "A", "a": "B"}}'), "it has the key 'a' twice"),
        (("-ac", '{"a":' * 40 + "1" + "}" * 40), "is nested more than 32 deep"),
        (("-ac", '{"a":' + "[" * 900 + "]" * 900 + "}"), "is nested more than 32 deep"),
        (("-ac", '{"a":' + "[" * 9000 + "]" * 9000 + "}"), "is n"),
        (("-ac", '{"per_role.": "A"}'), "has the key 'per_role.', which is not names joined by dots"),
        (("-ac.register.", "a.B"), "is not names joined by dots"),
        (("--attention-backend", "A,B"), "is a sweep"),
        (("--attention-backend", "[A]"), "attention.default=[A]: "),
        (("--attention-backend", "--steps"), "--attention-backend: has no value"),
    ],
)
def test_a_wrong_option_is_a_fault_with_the_way_out(words: tuple[str, ...], message: str) -> None:
    assert any(message in str(fault) for fault in faults_of(*words))


def test_an_option_that_ends_the_words_takes_no_value_that_was_not_written() -> None:
    for command in (("generate", "--prompt", "x"), ("explain",)):
        outcome = raylysses(*command, "-ac")
        assert outcome.code == 2
        assert outcome.err.startswith("error: -ac: has no value; write -ac ")
        assert outcome.err.count("error: ") == 1
    early = raylysses("-ac.backend", "REFERENCE", "explain")
    assert early.code == 2
    assert "-ac.backend: stands before the command; write it after generate or explain" in early.err


def test_values_of_other_options_are_left_alone() -> None:
    others, flags = split(["--prompt", "-ac", "-ac.backend", "X", "a=b", "--attention-backend=Y"], ["--prompt"])
    assert others == ["--prompt", "-ac", "a=b"]
    assert flags == [Flag("-ac", ("backend",), "X"), Flag("--attention-backend", (), "Y")]


def test_the_command_takes_the_options_and_corrects_them() -> None:
    outcome = raylysses("explain", "-ac.per_role.cross.backend", "REFERENCE", "--prompt", "-ac", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "role: attention.per_role.cross [command line]" in outcome.out
    for option, message in (
        ("--attention-backnd", "--attention-backnd: no such option; did you mean --attention-backend"),
        ("--attention-backend", "attention.default=TORCH_SPDA: no backend has that name; did you mean TORCH_SDPA?"),
    ):
        wrong = raylysses("explain", option, "TORCH_SPDA")
        assert wrong.code == 2
        assert message in wrong.err


def test_a_long_text_is_not_repeated_and_many_roles_are_no_depth() -> None:
    roles = ", ".join(f'"r{number}": {{"backend": "A"}}' for number in range(100))
    config, faults = compose(["generate.prompt=x", "-ac", f'{{"per_role": {{{roles}}}}}'], environ={})
    assert (faults, config is not None and len(config.attention.per_role)) == ((), 100)
    _, (fault,) = compose(["generate.prompt=x", "-ac", "[" * 5000 + "]" * 5000], environ={})
    assert len(str(fault)) < 500
