"""The published Wan pipelines, shrunk: every field of their config files, with fewer layers and heads, and narrower."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wan_folder import VOCAB_SIZE, WanFolderSpec, build

_HEADS, _HEAD_SIZE = 4, 32
_TEXT_DIM = 64

_LATENTS_MEAN = (
    -0.76,
    -0.71,
    -0.91,
    0.11,
    -0.17,
    0.97,
    -0.15,
    1.55,
    0.41,
    -0.07,
    0.55,
    -0.36,
    -0.19,
    -0.95,
    0.25,
    -0.29,
)
_LATENTS_STD = (2.82, 1.45, 2.33, 2.66, 1.22, 1.77, 2.61, 2.07, 3.27, 2.15, 2.87, 1.56, 1.64, 1.13, 2.83, 1.92)
_CHANNELS = len(_LATENTS_MEAN)


def _transformer(**changes: Any) -> dict[str, Any]:
    config = {
        "added_kv_proj_dim": None,
        "attention_head_dim": _HEAD_SIZE,  # published: 128
        "cross_attn_norm": True,
        "eps": 1e-6,
        "ffn_dim": 256,  # 13824; 14336 in the 5B
        "freq_dim": 64,  # 256
        "image_dim": None,
        "in_channels": _CHANNELS,
        "num_attention_heads": _HEADS,  # 40; 24 in the 5B
        "num_layers": 2,  # 40; 30 in the 5B
        "out_channels": _CHANNELS,
        "patch_size": [1, 2, 2],
        "pos_embed_seq_len": None,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": _TEXT_DIM,  # 4096
    }
    return config | changes


def _vae(**changes: Any) -> dict[str, Any]:
    config = {
        "attn_scales": [],
        "base_dim": 8,  # 96
        "dim_mult": [1, 2, 4, 4],
        "dropout": 0.0,
        "latents_mean": list(_LATENTS_MEAN),
        "latents_std": list(_LATENTS_STD),
        "num_res_blocks": 1,  # 2
        "temperal_downsample": [False, True, True],
        "z_dim": _CHANNELS,
    }
    return config | changes


def _scheduler(**changes: Any) -> dict[str, Any]:
    config = {
        "beta_end": 0.02,
        "beta_schedule": "linear",
        "beta_start": 0.0001,
        "disable_corrector": [],
        "dynamic_thresholding_ratio": 0.995,
        "final_sigmas_type": "zero",
        "flow_shift": 3.0,
        "lower_order_final": True,
        "num_train_timesteps": 1000,
        "predict_x0": True,
        "prediction_type": "flow_prediction",
        "rescale_betas_zero_snr": False,
        "sample_max_value": 1.0,
        "solver_order": 2,
        "solver_p": None,
        "solver_type": "bh2",
        "steps_offset": 0,
        "thresholding": False,
        "timestep_spacing": "linspace",
        "trained_betas": None,
        "use_beta_sigmas": False,
        "use_exponential_sigmas": False,
        "use_flow_sigmas": True,
        "use_karras_sigmas": False,
    }
    return config | changes


_WAN_22_SCHEDULER = {"time_shift_type": "exponential", "use_dynamic_shifting": False}

_TEXT_ENCODER = {
    "classifier_dropout": 0.0,
    "d_ff": 128,  # 10240
    "d_kv": 16,  # 64
    "d_model": _TEXT_DIM,
    "decoder_start_token_id": 0,
    "dense_act_fn": "gelu_new",
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "is_gated_act": True,
    "layer_norm_epsilon": 1e-6,
    "num_decoder_layers": 2,  # 24
    "num_heads": 4,  # 64
    "num_layers": 2,  # 24
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "scalable_attention": True,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,  # 256384
}

_IMAGE_ENCODER = {
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_size": 48,  # 1280
    "image_size": 32,  # 224
    "initializer_factor": 1.0,
    "initializer_range": 0.02,
    "intermediate_size": 96,  # 5120
    "layer_norm_eps": 1e-5,
    "num_attention_heads": 4,  # 16
    "num_channels": 3,
    "num_hidden_layers": 3,  # 32; the pipeline reads the last but one
    "patch_size": 8,  # 14
    "projection_dim": 32,  # 1024
}

_IMAGE_PROCESSOR = {
    "crop_size": {"height": 32, "width": 32},  # 224
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 32},  # 224
}

SPECS: Mapping[str, WanFolderSpec] = {
    "wan2.1-t2v": WanFolderSpec(
        pipeline="WanPipeline",
        transformer=_transformer(),
        vae=_vae(),
        text_encoder=_TEXT_ENCODER,
        scheduler=_scheduler(),
    ),
    "wan2.1-i2v": WanFolderSpec(
        pipeline="WanImageToVideoPipeline",
        transformer=_transformer(
            added_kv_proj_dim=_HEADS * _HEAD_SIZE,  # 5120, the inner width here too
            image_dim=_IMAGE_ENCODER["hidden_size"],
            in_channels=2 * _CHANNELS + 4,  # the noise, the encoded image and its mask
        ),
        vae=_vae(),
        text_encoder=_TEXT_ENCODER,
        scheduler=_scheduler(),
        image_encoder=_IMAGE_ENCODER,
        image_processor=_IMAGE_PROCESSOR,
    ),
    "wan2.2-t2v-a14b": WanFolderSpec(
        pipeline="WanPipeline",
        model_index={"boundary_ratio": 0.875},
        transformer=_transformer(),
        transformer_2=_transformer(),
        vae=_vae(),
        text_encoder=_TEXT_ENCODER,
        scheduler=_scheduler(**_WAN_22_SCHEDULER),
    ),
    "wan2.2-ti2v-5b": WanFolderSpec(
        pipeline="WanPipeline",
        model_index={"boundary_ratio": None, "expand_timesteps": True, "transformer_2": [None, None]},
        transformer=_transformer(),  # 48 channels
        vae=_vae(  # 48 channels
            base_dim=8,  # 160
            clip_output=False,
            decoder_base_dim=16,  # 256
            in_channels=12,
            is_residual=True,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
            scale_factor_temporal=4,
        ),
        text_encoder=_TEXT_ENCODER,
        scheduler=_scheduler(flow_shift=5.0, **_WAN_22_SCHEDULER),
    ),
}
"""By the published folder: Wan2.1-T2V-14B, Wan2.1-I2V-14B-480P, Wan2.2-T2V-A14B, Wan2.2-TI2V-5B (all `-Diffusers`)."""


def folder(name: str, tmp_root: Path) -> Path:
    """Return a folder of `SPECS[name]` under `tmp_root`, built at the first call."""
    path = tmp_root / name
    if not path.is_dir():
        build(path, spec=SPECS[name])
    return path
