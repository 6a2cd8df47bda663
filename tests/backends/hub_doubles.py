"""Stand-ins for the package `kernels` and the two FlashAttention kernels that it gets: their recorded signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from backends.kernels.flash_attn_hub import hub_kernel
from backends.kernels.packages import imported
from tests.backends.flash_answers import dense, dense_lse
from tests.backends.published import as_published
from tests.backends.vendor_doubles import band, put

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CALLS: list[dict[str, Any]] = []


@as_published("flash_attn2.flash_attn_func")
def flash_attn2_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    CALLS.append(locals())
    return _attention(q, k, v, softmax_scale, causal, (None,) if return_attn_probs else None)


@as_published("flash_attn3.flash_attn_func")
def flash_attn3_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: Any = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    CALLS.append(locals())
    return _attention(q, k, v, softmax_scale, causal, () if return_attn_probs else None)


def _attention(q: Any, k: Any, v: Any, scale: float, causal: bool, more: tuple[None, ...] | None) -> Any:
    """more: what comes after the log-sum-exp; None for the output alone."""
    allowed = band(q.shape[1], k.shape[1], causal=causal)
    out = dense(q, k, v, scale, allowed).nan_to_num(0)
    return out if more is None else (out, dense_lse(q, k, scale, allowed), *more)


class Hub:
    """What of `kernels` is called. fails: what the next call raises. folder: where the builds of a kernel are."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | str | None]] = []
        self.fails: Exception | None = None
        self.folder = f"/home/me/.cache/huggingface/hub/kernels--x/snapshots/{COMMIT}/build"

    @as_published("kernels.get_kernel", bound=True)
    def get_kernel(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        version: int | None = None,
        backend: str | None = None,
        user_agent: Any = None,
        trust_remote_code: Any = False,
        check_arch: bool = True,
    ) -> Any:
        if (revision is None) == (version is None):
            raise ValueError("one of revision and version")
        self.asked.append((repo_id, version or revision))
        if self.fails is not None:
            raise self.fails
        functions: dict[str, Callable[..., Any]] = {
            "kernels-community/flash-attn2": flash_attn2_func,
            "kernels-community/flash-attn3": flash_attn3_func,
        }
        return SimpleNamespace(flash_attn_func=functions[repo_id], __file__=f"{self.folder}/torch-cuda/__init__.py")


@contextmanager
def package(patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """`kernels`, as if it were installed, with a Hub that has both kernels for this torch."""
    hub = Hub()
    put(patch, kernels=hub)
    for cached in (imported, hub_kernel):
        cached.cache_clear()
    CALLS.clear()
    yield hub
    for cached in (imported, hub_kernel):
        cached.cache_clear()


def unconnected() -> Exception:
    """What the Hub's client raises without a network, which is no OSError."""
    from huggingface_hub.errors import HfHubHTTPError

    raised = HfHubHTTPError.__bases__[0]("[Errno -2] Name or service not known")
    assert isinstance(raised, Exception)
    assert not isinstance(raised, OSError)
    return raised
