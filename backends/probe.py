"""Whether the package behind a variant can be imported here: what only the process that will run it can find out."""

from __future__ import annotations

import functools

from backends.interface import AttentionBackend, Variant
from backends.options import Blocks
from backends.variant import USE_ANOTHER
from configs.faults import Fault, FaultError

# A missing symbol, library or driver; a wheel that was built for another numpy or Python.
_BROKEN = (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError, SyntaxError, AssertionError)


@functools.cache
def import_faults(backend: type[AttentionBackend], variant: Variant, options: Blocks = ()) -> tuple[Fault, ...]:
    """The fault of a kernel that is installed and cannot be imported; asked once for each, as imports are. A kernel
    that knows more about it raises a FaultError of its own. options: those that are set.
    """
    try:
        backend.get_impl_cls(variant).load(options)
    except FaultError as error:
        return error.faults
    except _BROKEN as error:
        what = " or ".join(variant.distributions) or variant.kernels
        rule = f"{what} cannot be imported here ({type(error).__name__}: {error})"
        remedy = f"install it again ({variant.install}), {USE_ANOTHER}" if variant.install else USE_ANOTHER
        return (Fault("packages", what, rule, remedy),)
    return ()
