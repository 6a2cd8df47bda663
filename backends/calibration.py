"""The skip-softmax calibration that a checkpoint carries: which threshold skips how many blocks of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

KEY = "sparse_attention_config"
"""The entry of a transformer's config.json."""
FORMULA = "a * exp(b * target_sparsity)"
"""The only one that is understood. It is compared, never evaluated."""


@dataclass(frozen=True)
class Calibration:
    """Of one transformer. ignore: patterns (fnmatch) of module names that stay dense."""

    a: float
    b: float
    ignore: tuple[str, ...] = ()

    def factor(self, target_sparsity: float) -> float:
        """What the kernel divides by the number of keys to get its threshold."""
        return self.a * math.exp(self.b * target_sparsity)

    def ignores(self, model: str, layer: str) -> bool:
        """Whether a layer stays dense. A pattern may name a module with its model (`transformer.blocks.0.attn1`) or
        without; what stands below a module that is named is dense with it.
        """
        parts = layer.split(".")
        names = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        names += [f"{model}.{name}" for name in names]
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.ignore)


@dataclass(frozen=True)
class Uncalibrated:
    """reason: why there is no calibration, as a clause."""

    reason: str


def read_calibration(config: Mapping[str, Any]) -> Calibration | Uncalibrated:
    """The calibration in a transformer's config.json, as NVIDIA's Model Optimizer writes it: in the group of
    `config_groups` whose algorithm is `skip_softmax`, or, as its older versions did, without groups.
    """
    found = config.get(KEY)
    if found is None:
        return Uncalibrated(f"its config.json has no {KEY}")
    groups = list(_groups(found))
    if len(groups) != 1:
        return Uncalibrated(f"the {KEY} of its config.json has {len(groups) or 'no'} groups for skip_softmax")
    (group,) = groups
    scale = group.get("threshold_scale_factor")
    if not isinstance(scale, Mapping):
        return Uncalibrated(f"the {KEY} of its config.json has no threshold_scale_factor with a formula")
    formula = scale.get("formula")
    if not isinstance(formula, str) or "".join(formula.split()) != FORMULA.replace(" ", ""):
        return Uncalibrated(f"the formula of its {KEY} is {formula!r}, and only {FORMULA} is understood")
    ignore = group.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        return Uncalibrated(f"the ignore of its {KEY} is {ignore!r}, not a list of patterns")
    return _calibration(scale.get("coefficients", scale.get("prefill")), tuple(ignore))


def _groups(found: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(found, Mapping):
        return
    groups = found.get("config_groups")
    if groups is None and "threshold_scale_factor" in found:
        yield found
    if isinstance(groups, Mapping):
        for group in groups.values():
            if isinstance(group, Mapping) and group.get("algorithm") == "skip_softmax":
                yield group


def _calibration(coefficients: Any, ignore: tuple[str, ...]) -> Calibration | Uncalibrated:
    given: list[Any] = [coefficients.get(name) if isinstance(coefficients, Mapping) else None for name in ("a", "b")]
    try:
        a, b = (float(value) if type(value) in (int, float) else math.nan for value in given)
        highest = a * math.exp(max(b, 0.0))
    except OverflowError:
        highest = math.inf
    if not (math.isfinite(highest) and a > 0 and math.isfinite(b)):
        rule = f"a={given[0]} and b={given[1]} of its {KEY} are no finite numbers, or no curve with a above 0"
        return Uncalibrated(rule)
    return Calibration(a, b, ignore)
