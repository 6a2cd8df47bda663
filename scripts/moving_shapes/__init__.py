"""The world of the tiny model: clips of moving shapes, the sentences that describe them, and the judge of a video."""
