"""`AutoencoderKLWan` over a whole clip at once.

The stock class walks through a clip four frames at a time, with caches, which keeps memory low and a GPU idle. All its
layers are causal in time, so one pass over all frames gives the same; only the layers that change the number of frames
must be told to treat the first frame apart, as the walk does.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class WholeClip(torch.nn.Module):
    """A view of `vae` with the same weights, to train with. The stock class stays usable for its weights only."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae
        for weight in vae.parameters():
            if weight.dim() in _CHANNELS_LAST:  # in which GPUs convolve
                weight.data = weight.data.contiguous(memory_format=_CHANNELS_LAST[weight.dim()])
        for module in vae.modules():
            if isinstance(module, WanResample):
                module.forward = MethodType(_resample, module)

    def encode(self, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and log variance of the latents [B, z, 1 + (F - 1) / 4, H / 8, W / 8] of clips [B, 3, F, H, W]."""
        patches = patchify(clip, self.vae.config.patch_size).contiguous(memory_format=torch.channels_last_3d)
        moments = self.vae.quant_conv(self.vae.encoder(patches))
        mean, log_variance = moments.chunk(2, dim=1)
        return mean, log_variance.clamp(-30, 20)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The clips of latents; unlike the stock class's they are not clamped to -1..1."""
        decoded = self.vae.decoder(self.vae.post_quant_conv(latents), first_chunk=True)
        result: torch.Tensor = unpatchify(decoded, self.vae.config.patch_size)
        return result


def _resample(self: Any, x: torch.Tensor, feat_cache: None = None, feat_idx: None = None) -> torch.Tensor:
    """`WanResample.forward` for a whole clip: in time, the first frame is not doubled and not halved."""
    if self.mode == "upsample3d" and x.shape[2] > 1:
        first, rest = x[:, :, :1], x[:, :, 1:]
        batch, channels, frames, height, width = rest.shape
        pairs = self.time_conv(rest).reshape(batch, 2, channels, frames, height, width)
        x = torch.cat([first, pairs.permute(0, 2, 3, 1, 4, 5).reshape(batch, channels, -1, height, width)], 2)
    frames = x.shape[2]
    x = self.resample(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, frames)).transpose(1, 2)
    if self.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], 2)
    return x
