"""What the driver and `explain` know of a model without loading it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from backends.calibration import Calibration, Uncalibrated
from backends.requirements import Kind


@dataclass(frozen=True)
class RoleFacts:
    """The layers that share a role. category: what the role falls back to in the configuration. layers: how many
    there are. allow_trtllm_default: whether their calls meet the contract of backends that ask for permission.
    """

    role: str
    kind: Kind
    category: str
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    allow_trtllm_default: bool = False


UNREAD = Uncalibrated("nobody has read its config.json for one")


@dataclass(frozen=True)
class ModelFacts:
    """patch: latent frames, rows and columns of one token. axis_limit: how many tokens an axis of the video may have.
    kv_heads: of self-attention, where they are fewer than its query heads. calibration: that its
    checkpoint carries, for options that need one. parameters: their number, None if unknown.
    """

    roles: tuple[RoleFacts, ...]
    heads: int
    patch: tuple[int, int, int]
    axis_limit: int
    kv_heads: int | None = None
    calibration: Calibration | Uncalibrated = UNREAD
    parameters: int | None = None

    def tokens(self, latent: tuple[int, int, int]) -> int:
        """The sequence length of a latent of so many frames, rows and columns."""
        frames, rows, columns = (size // patch for size, patch in zip(latent, self.patch, strict=True))
        return frames * rows * columns
