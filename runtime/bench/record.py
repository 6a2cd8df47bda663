"""What bench.json says: a pure function over plain values. It follows docs/bench.schema.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from backends.platforms.facts import DeviceFacts
from runtime.bench.results import BASELINE, Row
from runtime.errors import RankPlace
from runtime.summary import Failure, Status, versions

VERSION = 1


@dataclass(frozen=True)
class Facts:
    """Of the whole bench. device: of the ranks, as far as the driver knows it."""

    device: DeviceFacts
    dtype: str
    places: tuple[RankPlace, ...]
    rounds: int
    causal: bool
    seed: int


def record(status: Status, facts: Facts, rows: Iterable[Row], failure: Failure | None = None) -> dict[str, Any]:
    """The whole file as JSON values."""
    return {
        "version": VERSION,
        "status": status,
        "error": None if failure is None else asdict(failure),
        "world_size": len(facts.places),
        "nodes": len({place.node_id for place in facts.places}),
        "ranks": [
            {"rank": place.rank, "host": place.host, "hostname": place.hostname, "gpu": place.gpu}
            for place in facts.places
        ],
        "device": facts.device.label,
        "device_name": facts.device.name,
        "dtype": facts.dtype,
        "rounds": facts.rounds,
        "causal": facts.causal,
        "seed": facts.seed,
        "versions": versions(),
        "baseline": BASELINE,
        "rows": [row.to_dict() for row in rows],
    }
