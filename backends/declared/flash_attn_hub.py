"""FLASH_ATTN_HUB and FLASH_ATTN_3_HUB: FlashAttention as built on the Hugging Face Hub, got by the package `kernels`.
Not in any automatic order, since a rank may have to download the kernel first.

Read from the sources in the repository huggingface/kernels-community. Version 2 of `flash-attn2` (8a730d9): bfloat16
and float16, multiples of 8 up to 256, also when differentiated (flash_api.cpp), built for 8.0 and 9.0 (build.toml; its
builds for 10.0 and 12.0 are not claimed). Version 1 of `flash-attn3` (40d4194): built for 9.0 (build.toml) with head
sizes 64, 96, 128, 192 and 256 and everything switched on (flash_attn_config.py). Of what they take, only causality,
fewer KV heads, the log-sum-exp and gradients are claimed. Not run on hardware.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from backends.interface import AttentionBackend, Capabilities, HeadSizes, Variant
from backends.options import option
from configs.checks import Refusal, text

_IMPL = "backends.kernels.flash_attn_hub"
_PACKAGE = "kernels"
_LEAST = "0.16.1"  # what was read; its `get_kernel` asks for a version, as that of 0.17.2 does


def _commit(value: Any, source: str) -> Any:
    checked = text()(value, source)
    if isinstance(checked, Refusal) or re.fullmatch("[0-9a-f]{40}", checked):
        return checked
    return Refusal("takes a commit, since branches move", "give its 40 hexadecimal digits, as the report does")


@dataclass(frozen=True)
class HubOptions:
    """revision: the commit of the kernel's repository to run; without one, what the version's branch leads to."""

    revision: str | None = option(_commit)


def _variant(name: str, impl: str, head_sizes: HeadSizes, *chips: str) -> Variant:
    return Variant(
        name,
        f"{_IMPL}.{impl}",
        chips=chips,
        distributions=(_PACKAGE,),
        install=f"pip install '{_PACKAGE}>={_LEAST}'",
        at_least=((_PACKAGE, _LEAST),),
        takes=Capabilities(
            causal=True,
            grouped=True,
            dtypes=("bfloat16", "float16"),
            head_sizes=head_sizes,
            masks=("none",),
            lse=True,
            gradient=True,
        ),
    )


class FlashAttnHubBackend(AttentionBackend):
    blocks: ClassVar[Mapping[str, type]] = {"options": HubOptions}
    variants = (_variant("flash-attn2", "HubFlashAttn2Impl", HeadSizes(8, 256), "cuda:8.x", "cuda:9.x"),)

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_HUB"


class FlashAttn3HubBackend(AttentionBackend):
    blocks: ClassVar[Mapping[str, type]] = {"options": HubOptions}
    variants = (_variant("flash-attn3", "HubFlashAttn3Impl", HeadSizes(0, None, (64, 96, 128, 192, 256)), "cuda:9.0"),)

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_3_HUB"
