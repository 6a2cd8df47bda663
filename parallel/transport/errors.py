"""What becomes of an exchange that cannot be made."""

from __future__ import annotations

LOST = "look at the errors of the other ranks: one of them has ended, is stuck, or makes other calls"
SIZES = "give it this rank's rows, as the plan's shares name them, and all heads of the layer that the plan is of"


class ExchangeError(RuntimeError):
    """An exchange that failed. verb: the exchange; reason: what the library below says; remedy: the way out. layer: the
    one whose call it was a part of, or the model; empty outside of both.
    """

    def __init__(self, verb: str, reason: str, remedy: str = LOST) -> None:
        self.verb, self.reason, self.remedy = verb, reason, remedy
        self.layer = ""
        super().__init__(verb, reason, remedy)

    def __str__(self) -> str:
        layer = f"{self.layer}: " if self.layer else ""
        return f"{layer}{self.verb}: {self.reason}; {self.remedy}"


class ExchangeSizeError(ExchangeError, ValueError):
    """Tensors of other sizes than the plan's, refused before they are sent."""

    def __init__(self, verb: str, reason: str, remedy: str = SIZES) -> None:
        super().__init__(verb, reason, remedy)
