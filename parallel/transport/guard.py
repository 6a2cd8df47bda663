"""Gives every failure of a collective one type, so that a cause and its consequences differ by type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parallel.transport.errors import ExchangeError

KEPT_ERRORS = (ExchangeError, torch.OutOfMemoryError)
"""They say what happened; other errors of what carries an exchange say neither which nor what to do."""


@contextmanager
def exchange(verb: str) -> Iterator[None]:
    """Raise what torch.distributed raises in the block as ExchangeError.

    Only calls that wait for other ranks belong in the block: an error of this rank alone must keep its type.

    Args:
        verb: What the ranks do together, for the message.

    Raises:
        ExchangeError: The block raised a RuntimeError, as torch does for every failure of a collective.
    """
    try:
        yield
    except KEPT_ERRORS:
        raise
    except RuntimeError as error:
        raise ExchangeError(verb, str(error)) from error
