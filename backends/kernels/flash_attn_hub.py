"""FlashAttention 2 and 3 of the Hugging Face Hub, on [B, S, H, D] tensors as they are; both are differentiable.

`kernels.get_kernel` finds the build for this torch, CUDA and platform in the Hub's cache of this node, or downloads it.
A version is a branch of the kernel's repository, so the report names the commit that the branch led to, and the option
`revision` asks for one commit instead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import HfHubHTTPError

from backends.interface import AttentionImpl, AttentionMetadata
from backends.kernels.packages import first, imported
from backends.options import Blocks
from configs.faults import Fault, FaultError

_UNREACHABLE: tuple[type[Exception], ...] = (ValueError, *HfHubHTTPError.__bases__)
"""What `get_kernel` makes of an answer that it does not like, OSError, and the error of the HTTP package beneath."""


@dataclass(frozen=True)
class HubKernel:
    """commit: of its repository; `local` for a folder that stands for it (LOCAL_KERNELS, a variable of `kernels`)."""

    module: Any
    commit: str


@functools.cache
def hub_kernel(repository: str, version: int, revision: str | None = None) -> HubKernel:
    """The kernel, downloaded if this node does not have it. revision: its commit, instead of the version's latest.

    Raises FaultError if it cannot be had or does not load, and what the import of `kernels` raises.
    """
    get = imported("kernels.get_kernel")
    kernel = f"{repository}, version {version}" if revision is None else f"{repository}, commit {revision}"
    try:
        module = get(repository, version=version) if revision is None else get(repository, revision=revision)
    except (FileNotFoundError, RuntimeError, ImportError, AttributeError) as error:
        ways = "install a torch that it is built for, or, if this node is offline, fill its cache before"
        raise FaultError([_fault(kernel, error, ways)]) from error
    except _UNREACHABLE as error:
        ways = "let this node reach huggingface.co, or fill its cache before"
        raise FaultError([_fault(kernel, error, ways)]) from error
    parts = Path(module.__file__).parts  # in the Hub's cache: .../snapshots/COMMIT/build/...
    commit = parts[parts.index("snapshots") + 1] if "snapshots" in parts else "local"
    if revision not in (None, commit):
        rule = f"{repository} is {commit} on this node"
        raise FaultError([Fault("options.revision", revision, rule, "leave it, or LOCAL_KERNELS, out")])
    return HubKernel(module, commit)


def _revision(options: Mapping[str, Any]) -> str | None:
    return getattr(options.get("options"), "revision", None)


def _fault(kernel: str, error: Exception, ways: str) -> Fault:
    reason = next(iter(str(error).splitlines()), "").rstrip(".:")
    rule = f"{kernel}, cannot be had from the Hugging Face Hub here ({type(error).__name__}: {reason})"
    return Fault("packages", kernel, rule, f"{ways}, or use FLASH_ATTN or TORCH_SDPA")


class HubImpl(AttentionImpl):
    """repository, version: of the kernel on the Hub. function: what is called of it; with `return_attn_probs` it
    returns (output, LSE, ...), the LSE as natural logarithms in fp32, [B, H, Sq].
    """

    repository: ClassVar[str]
    version: ClassVar[int]
    function: ClassVar[str] = "flash_attn_func"
    _commit: str = ""

    @property
    def kernel(self) -> str:
        return f"{self.repository}@{self._commit or f'v{self.version}'}.{self.function}"

    @classmethod
    def load(cls, options: Blocks = ()) -> None:
        getattr(hub_kernel(cls.repository, cls.version, _revision(dict(options))).module, cls.function)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self._commit = self._found().commit

    def _found(self) -> HubKernel:
        return hub_kernel(self.repository, self.version, _revision(self.options))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        return first(self._call(query, key, value))

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._call(query, key, value, return_attn_probs=True)
        return out, lse.masked_fill(lse == float("inf"), float("-inf"))  # plus infinity for a row without keys

    def _call(self, *qkv: torch.Tensor, **asked: Any) -> Any:
        function = getattr(self._found().module, self.function)
        return function(*qkv, softmax_scale=self.softmax_scale, causal=self.causal, **asked)


class HubFlashAttn2Impl(HubImpl):
    repository = "kernels-community/flash-attn2"
    version = 2


class HubFlashAttn3Impl(HubImpl):
    repository = "kernels-community/flash-attn3"
    version = 1
