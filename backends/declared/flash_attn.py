"""FLASH_ATTN: FlashAttention 3 where it is installed and built for the chip, else FlashAttention 4.

What each wheel takes is read from the wheels: `fa3-fwd` 0.0.3 is built without fp16, backward and windows
(`fa3_fwd_config.CONFIG`); `flash-attn-4` 4.0.0b36 limits head sizes per chip (`_validate_head_dims`). On Hopper
FlashAttention 3 comes first: it has the higher throughput there. FlashAttention 4 on Blackwell has not been run on
hardware.
"""

from backends.interface import AttentionBackend, Variant

_FA4 = "backends.kernels.flash_attn.FlashAttn4Impl"
_INSTALL_FA4 = "pip install 'flash-attn-4>=4.0.0b18'"


class FlashAttnBackend(AttentionBackend):
    variants = (
        Variant(
            "fa3",
            "backends.kernels.flash_attn.FlashAttn3Impl",
            platforms=("cuda",),
            capabilities=((9, 0),),
            distributions=("fa3-fwd",),
            install="pip install fa3-fwd",
            head_size_step=8,
            head_size_limit=256,
            dtypes=("bfloat16",),
            masks=("none",),
        ),
        Variant(
            "fa4",
            _FA4,
            platforms=("cuda",),
            capabilities=((9, 0),),
            distributions=("flash-attn-4",),
            install=_INSTALL_FA4,
            head_size_step=8,
            head_size_limit=256,
            dtypes=("bfloat16", "float16"),
            masks=("none",),
        ),
        Variant(
            "fa4-blackwell",
            _FA4,
            platforms=("cuda",),
            capabilities=((10, None), (11, None)),
            distributions=("flash-attn-4",),
            install=_INSTALL_FA4,
            head_size_step=8,
            head_size_limit=128,
            head_sizes_above=(256,),
            dtypes=("bfloat16", "float16"),
            masks=("none",),
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"
