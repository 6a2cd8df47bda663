"""What options may need to know of the layer that they are for. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.calibration import Calibration, Uncalibrated


class DenoisingTime:
    """How far the denoising under way is, on the host: from 1, which is noise, to 0.

    One object for all layers of a rank: whoever drives the steps tells it, kernels read it. It asks no device.
    """

    def __init__(self) -> None:
        self._times: tuple[float, ...] = ()
        self._step = 0

    def begin(self, times: Sequence[float]) -> None:
        """A denoising begins, at its first step. times: of every step."""
        self._times, self._step = tuple(times), 0

    def advance(self) -> None:
        """A step has ended."""
        self._step += 1

    def end(self) -> None:
        """The denoising has ended."""
        self._times = ()

    @property
    def now(self) -> float | None:
        """The time of the step under way; None outside of a denoising."""
        return self._times[self._step] if self._step < len(self._times) else None


@dataclass(frozen=True)
class LayerFacts:
    """model: the component (`transformer`). name: of the layer in it (`blocks.0.attn1`). denoising: None where nobody
    tells the time.
    """

    model: str
    name: str
    calibration: Calibration | Uncalibrated
    denoising: DenoisingTime | None = None
