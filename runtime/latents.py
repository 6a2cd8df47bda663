"""Whether the ranks of a request ended with the same latents; plain numbers, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from runtime.errors import RankPlace

FINGERPRINT_PIECES = 1024
"""How many sums stand for the latents of a rank (see `runtime.noise.fingerprint`)."""
TOLERANCE = 1e-4
"""Relative L2 distance. Nodes with other processors round a scheduler's step differently, by some 1e-7 a step."""


def latent_differences(
    request: int, fingerprints: Mapping[int, Sequence[float]], places: Sequence[RankPlace]
) -> tuple[str, ...]:
    """Compares every rank's latents with the first rank's.

    Args:
        request: The request's number, from 0.
        fingerprints: By rank, the sums over the pieces of its latents.
        places: Where each rank runs, by rank.

    Returns:
        A line for each rank whose latents differ; empty if all agree.
    """
    first = min(fingerprints, default=0)
    return tuple(
        f"request {request}: the latents of {places[rank]} are off by {off:.3g} (relative L2) from those of "
        f"{places[first]}"
        for rank in sorted(fingerprints)
        if not (off := _distance(fingerprints[rank], fingerprints[first])) <= TOLERANCE
    )


def _distance(values: Sequence[float], expected: Sequence[float]) -> float:
    if len(values) != len(expected):
        return math.inf
    size = math.hypot(*expected)
    off = math.hypot(*(value - other for value, other in zip(values, expected, strict=True)))
    return off / size if size else off
