"""REFERENCE: plain softmax attention, the yardstick of the others. Slow and quadratic in memory by intent."""

from backends.interface import AttentionBackend, Variant


class ReferenceBackend(AttentionBackend):
    variants = (Variant("plain", "backends.kernels.reference.ReferenceImpl"),)

    @staticmethod
    def get_name() -> str:
        return "REFERENCE"
