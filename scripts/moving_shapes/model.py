"""The parts of the tiny model, as stock classes of diffusers and transformers, and its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from moving_shapes.wording import vocabulary

LATENT_CHANNELS = 16
TEXT_WIDTH = 64
TEXT_LENGTH = 512
"""Rows of text that WanPipeline gives the transformer, the unused ones zero."""
CAPTION_LENGTH = 48
"""Tokens that any training sentence fits in."""
VOCABULARY_SIZE = 128

VAE_CONFIG: dict[str, Any] = {
    "attn_scales": [],
    "base_dim": 24,
    "decoder_base_dim": 32,
    "dim_mult": [1, 2, 2],
    "in_channels": 12,
    "is_residual": True,
    "num_res_blocks": 1,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 8,
    "scale_factor_temporal": 4,
    "temperal_downsample": [True, True],
    "z_dim": LATENT_CHANNELS,
}
"""Half the resolution is taken by 2 x 2 patches, as in Wan 2.2's 5B: full-size convolutions cost most."""
TRANSFORMER_CONFIG: dict[str, Any] = {
    "attention_head_dim": 64,
    "cross_attn_norm": True,
    "ffn_dim": 512,
    "freq_dim": 64,
    "in_channels": LATENT_CHANNELS,
    "num_attention_heads": 4,
    "num_layers": 6,
    "out_channels": LATENT_CHANNELS,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "text_dim": TEXT_WIDTH,
}
TEXT_ENCODER_CONFIG: dict[str, Any] = {
    "d_ff": 128,
    "d_kv": 16,
    "d_model": TEXT_WIDTH,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": VOCABULARY_SIZE,
}
SCHEDULER_CONFIG: dict[str, Any] = {
    "flow_shift": 3.0,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}
PARTS = ("vae", "transformer", "text_encoder", "tokenizer", "scheduler")
HISTORY = "training.json"
"""What was done to the weights, piece by piece, beside them."""
SCORES = "scores"
"""The piece of the history that is no training."""


@dataclass
class TinyWan:
    """The modules of the model and the record of their training."""

    vae: Any
    transformer: Any
    text_encoder: Any
    tokenizer: Any
    scheduler: Any
    history: list[dict[str, Any]]

    @classmethod
    def new(cls, seed: int) -> Self:
        """Untrained, with the libraries' own initial weights."""
        torch.manual_seed(seed)
        return cls(
            vae=diffusers.AutoencoderKLWan(**VAE_CONFIG),
            transformer=diffusers.WanTransformer3DModel(**TRANSFORMER_CONFIG),
            text_encoder=transformers.UMT5EncoderModel(transformers.UMT5Config(**TEXT_ENCODER_CONFIG)),
            tokenizer=word_tokenizer(vocabulary()),
            scheduler=diffusers.UniPCMultistepScheduler(**SCHEDULER_CONFIG),
            history=[],
        )

    @classmethod
    def load(cls, folder: Path) -> Self:
        """As it was saved, in float32. Raises OSError where a part is missing."""
        pipeline = diffusers.WanPipeline.from_pretrained(folder, dtype=torch.float32)
        history = json.loads((folder / HISTORY).read_text(encoding="utf-8"))
        return cls(**{name: getattr(pipeline, name) for name in PARTS}, history=history)

    def save(self, folder: Path) -> None:
        """Write a stock diffusers folder with weights in float16, and the history; the modules come out in float16.

        The range of float16 is wide enough for these weights, and it keeps three more bits of each than bfloat16.
        """
        for module in (self.vae, self.transformer, self.text_encoder):
            for tensor in (*module.parameters(), *module.buffers()):
                if not bool(tensor.abs().max() < torch.finfo(torch.float16).max):
                    raise OverflowError("a weight is not finite or does not fit in float16: the training diverged")
                # Not module.to(): diffusers would warn of modules that are better kept in float32 to compute with.
                tensor.data = tensor.data.to("cpu", torch.float16)
        pipeline = diffusers.WanPipeline(**{name: getattr(self, name) for name in PARTS})
        pipeline.save_pretrained(folder)
        # transformers loads in the dtype that the config names, diffusers in float32: let both do the latter.
        config = folder / "text_encoder" / "config.json"
        config.write_text(config.read_text(encoding="utf-8").replace('"float16"', '"float32"'), encoding="utf-8")
        (folder / HISTORY).write_text(json.dumps(self.history, indent=1) + "\n", encoding="utf-8")


def word_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer with a token for each word, and one for every other word; it ends a text as T5's does."""
    special = ("<pad>", "</s>", "<unk>")
    tokens = [*special, *words]
    if len(tokens) > VOCABULARY_SIZE:
        raise ValueError(f"{len(tokens)} tokens do not fit in a vocabulary of {VOCABULARY_SIZE}")
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=TEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
