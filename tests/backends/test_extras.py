"""What a variant needs, what its fault says to install and what an extra of ours installs are the same."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from backends.interface import Requirements, Variant
from backends.platforms.facts import DeviceFacts, parse_device
from backends.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {
    name: [Requirement(text) for text in requirements]
    for name, requirements in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].items()
    if name != "dev"
}
BUILT_BY_HAND = {
    "flash-attn-3": "build the wheel of MATE's wrappers/flash-attention",
    "sageattn3": "build sageattention3_blackwell of github.com/thu-ml/SageAttention",
}
"""Packages that no index has."""
VARIANTS = [
    (name, variant)
    for name in Registry.built_in().names()
    for variant in Registry.built_in().get_class(name).variants
    if variant.distributions
]
every_variant = pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=[f"{n}-{v.name}" for n, v in VARIANTS])


def least(requirement: Requirement) -> Version:
    """The oldest version that a requirement takes."""
    bounds = [Version(one.version) for one in requirement.specifier if one.operator in (">=", "==")]
    assert len(bounds) == len(list(requirement.specifier)) <= 1, requirement
    return bounds[0] if bounds else Version("0")


def needed(variant: Variant) -> Version:
    return max((Version(version) for _, version in variant.at_least), default=Version("0"))


def without_packages(variant: Variant) -> DeviceFacts:
    chip = variant.chips[0].replace(".x", ".0")
    return parse_device(chip, {}, all_packages=False)


@every_variant
def test_an_extra_installs_what_the_variant_needs(name: str, variant: Variant) -> None:
    (distribution,) = variant.distributions
    found = [extra for extra, needs in EXTRAS.items() if any(one.name == distribution for one in needs)]
    assert len(found) == (0 if distribution in BUILT_BY_HAND else 1)
    for extra in found:
        (requirement,) = EXTRAS[extra]
        assert least(requirement) >= needed(variant)


@every_variant
def test_what_is_absent_is_a_fault_with_the_line_that_installs_it(name: str, variant: Variant) -> None:
    (distribution,) = variant.distributions
    required = Requirements(128, 4, 4, "bfloat16", "self")
    rules = [fault.rule for fault in variant.faults(required, without_packages(variant))]
    assert rules == [f"the package {distribution} is not installed ({variant.install})"]
    if distribution in BUILT_BY_HAND:
        assert variant.install == BUILT_BY_HAND[distribution]
        return
    pip, install, text = shlex.split(variant.install)
    requirement = Requirement(text)
    assert (pip, install, requirement.name) == ("pip", "install", distribution)
    assert least(requirement) >= needed(variant) or not requirement.specifier  # pip takes the newest then
    (extra,) = (one for needs in EXTRAS.values() for one in needs if one.name == distribution)
    assert least(extra) >= least(requirement)


def test_every_extra_is_some_variants() -> None:
    wanted = {distribution for _, variant in VARIANTS for distribution in variant.distributions}
    assert {one.name for needs in EXTRAS.values() for one in needs} == wanted - set(BUILT_BY_HAND)


def test_the_documentation_has_every_package_with_its_extra() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (?:`\[(\w+)\]`|none[^|]*) \| ([^|]+) \|$", _packages(), re.MULTILINE)
    table = {package: (extra, backends.strip()) for package, extra, backends in rows}
    extras = {needs[0].name: extra for extra, needs in EXTRAS.items()} | dict.fromkeys(BUILT_BY_HAND, "")
    users: dict[str, list[str]] = {}
    for name, variant in VARIANTS:
        for distribution in variant.distributions:
            if name not in users.setdefault(distribution, []):
                users[distribution].append(name)
    assert table == {package: (extras[package], ", ".join(names)) for package, names in users.items()}


def _packages() -> str:
    text = (ROOT / "docs" / "backends.md").read_text()
    return text.partition("## Packages")[2].partition("\n## ")[0]


def test_the_readme_names_every_extra() -> None:
    text = (ROOT / "README.md").read_text()
    assert [extra for extra in EXTRAS if f"`{extra}`" not in text] == []
