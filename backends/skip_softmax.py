"""Skipping blocks of keys that hardly matter (arXiv:2512.12087): the option block, and what it means for a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.calibration import Calibration, Uncalibrated
from backends.layer_facts import DenoisingTime, LayerFacts
from backends.options import option
from configs.checks import Refusal, real


@dataclass(frozen=True)
class SkipSoftmax:
    """threshold: the weight, relative to the row's largest so far, below which all of a block has to be for it to be
    skipped; 0 skips nothing. target_sparsity: the part of the blocks to skip; the checkpoint's calibration says which
    threshold that takes. disabled_until_timestep: nothing is skipped while the denoising time, which goes from 1 to 0,
    is above it; 0, as if it were not set, skips at all times.
    """

    threshold: float | None = option(real(0))
    target_sparsity: float | None = option(real(0, 1))
    disabled_until_timestep: float | None = option(real(0, 1))

    @property
    def setting(self) -> tuple[str, float] | None:
        """Field and value of what makes it skip; None if nothing does."""
        if self.target_sparsity is not None:
            return "target_sparsity", self.target_sparsity
        return ("threshold", self.threshold) if self.threshold else None

    def faults(self) -> Iterator[Refusal]:
        if self.threshold is not None and self.target_sparsity is not None:
            rule = f"threshold={self.threshold:g} and target_sparsity={self.target_sparsity:g} both say what is skipped"
            yield Refusal(rule, "keep one of the two")
        elif self.disabled_until_timestep is not None and self.threshold is None and self.target_sparsity is None:
            when = f"disabled_until_timestep={self.disabled_until_timestep:g}"
            rule = f"{when} says when, and nothing says what is skipped"
            yield Refusal(rule, "set target_sparsity or threshold, or leave it out")

    def model_faults(self, model: str, calibration: Calibration | Uncalibrated) -> Iterator[tuple[str, Refusal]]:
        """(field, refusal) of what a checkpoint lacks."""
        if self.target_sparsity is not None and isinstance(calibration, Uncalibrated):
            rule = f"{model} has no calibration of its own, which says the threshold: {calibration.reason}"
            yield "target_sparsity", Refusal(rule, "set skip_softmax.threshold, or use a calibrated checkpoint")

    def layer_faults(self, layer: LayerFacts) -> Iterator[tuple[str, Refusal]]:
        """(field, refusal) of what the surroundings of a layer lack."""
        yield from self.model_faults(layer.model, layer.calibration)
        if self.disabled_until_timestep and layer.denoising is None:
            rule = f"nobody tells {layer.name} the denoising time"
            yield "disabled_until_timestep", Refusal(rule, "give its context a DenoisingTime, or leave it out")

    def of_layer(self, layer: LayerFacts) -> LayerSkip:
        """What the layer's kernel gets; after `layer_faults` has found nothing."""
        factor, threshold = None, self.threshold or 0.0
        if self.target_sparsity is not None and isinstance(layer.calibration, Calibration):
            ignored = layer.calibration.ignores(layer.model, layer.name)
            factor = None if ignored else layer.calibration.factor(self.target_sparsity)
        return LayerSkip(threshold, factor, self.disabled_until_timestep or 0.0, layer.denoising)


@dataclass(frozen=True)
class LayerSkip:
    """The block of one layer: a threshold, or the factor of its calibration, or neither: then it is dense."""

    threshold: float = 0.0
    calibrated: float | None = None
    until: float = 0.0
    denoising: DenoisingTime | None = None

    def factor(self, keys: int) -> float | None:
        """What the kernel divides by the number of keys to get its threshold; None skips nothing.

        Raises ValueError if that depends on the time, and there is none.
        """
        if not self.threshold and not self.calibrated:
            return None
        if self.until > 0:
            now = None if self.denoising is None else self.denoising.now
            if now is None:
                raise ValueError(
                    f"skip_softmax.disabled_until_timestep={self.until:g}: the denoising time is not known, as no "
                    "denoising is under way; let its driver tell it (DenoisingTime.begin), or leave the setting out"
                )
            if now > self.until:
                return None
        return self.calibrated or self.threshold * keys
