"""A complete, tiny Wan diffusers folder made from a seed, for any `WanFolderSpec`.

Its weights are random, so its videos are coloured noise, but scaled so that attention decides the noise: a swapped head
or a lost row shows in the latents.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Config = Mapping[str, Any]

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
"""Tokens 0, 1 and 2, as T5 numbers them; the 256 bytes follow."""

VOCAB_SIZE = 3 + 256


@dataclass(frozen=True)
class WanFolderSpec:
    """What a Wan diffusers folder holds, as plain data.

    The component configs take the fields of the published `config.json` files; `model_index` takes the pipeline's own
    options (`boundary_ratio`, `expand_timesteps`). A component that is None is absent from the folder.
    """

    pipeline: str
    transformer: Config
    vae: Config
    text_encoder: Config
    scheduler: Config
    scheduler_class: str = "UniPCMultistepScheduler"
    model_index: Config = field(default_factory=dict)
    transformer_2: Config | None = None
    image_encoder: Config | None = None
    image_processor: Config | None = None
    text_length: int = 512


TINY_WAN = WanFolderSpec(
    pipeline="WanPipeline",
    model_index={"boundary_ratio": None, "expand_timesteps": False},
    transformer={
        "added_kv_proj_dim": None,
        "attention_head_dim": 64,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "ffn_dim": 512,
        "freq_dim": 64,
        "image_dim": None,
        "in_channels": 8,
        "num_attention_heads": 4,
        "num_layers": 4,
        "out_channels": 8,
        "patch_size": [1, 2, 2],
        "pos_embed_seq_len": None,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": 64,
    },
    vae={
        "attn_scales": [],
        "base_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        # Neither zeros nor ones, so that a decode which forgets to undo the normalisation looks wrong.
        "latents_mean": [-0.4, 0.3, 0.1, -0.2, 0.5, -0.1, 0.2, -0.3],
        "latents_std": [1.2, 0.8, 1.5, 1.0, 0.9, 1.3, 1.1, 0.7],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "z_dim": 8,
    },
    text_encoder={
        "d_ff": 128,
        "d_kv": 16,
        "d_model": 64,
        "feed_forward_proj": "gated-gelu",
        "num_heads": 4,
        "num_layers": 2,
        "vocab_size": VOCAB_SIZE,
    },
    scheduler={
        "flow_shift": 3.0,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    },
)
"""4 layers, 4 heads of 64, latents of 8 channels: 3.8 M parameters in the transformer, 2.5 M in the VAE."""


def build(folder: Path, *, seed: int = 0, spec: WanFolderSpec = TINY_WAN) -> None:
    """Write a complete diffusers folder of `spec` with random float32 weights.

    The same spec and seed give the same weights, whatever the machine; the caller's random state is left as it was.
    Files of the same names are replaced, others stay. Raises RuntimeError inside a process group, where transformers
    would write nothing on any rank but the first.
    """
    import diffusers
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError("a model is built before its process joins a group, not inside one")

    models = _models(spec)
    index: dict[str, Any] = {"_class_name": spec.pipeline, "_diffusers_version": diffusers.__version__}
    for component, model in models.items():
        _fill(model, component, seed)
        with _no_progress_bars():
            model.save_pretrained(folder / component)
        index[component] = [type(model).__module__.partition(".")[0], type(model).__name__]

    scheduler = getattr(diffusers, spec.scheduler_class).from_config(dict(spec.scheduler))
    scheduler.save_pretrained(folder / "scheduler")
    index["scheduler"] = ["diffusers", spec.scheduler_class]
    _tokenizer(spec.text_length).save_pretrained(folder / "tokenizer")
    index["tokenizer"] = ["transformers", "PreTrainedTokenizerFast"]
    if spec.image_processor is not None:
        # By hand: without torchvision the library would write the name of its substitute class.
        processor = {"image_processor_type": "CLIPImageProcessor"} | dict(spec.image_processor)
        (folder / "image_processor").mkdir(exist_ok=True)
        _write_json(folder / "image_processor" / "preprocessor_config.json", processor)
        index["image_processor"] = ["transformers", "CLIPImageProcessor"]
    # Last, because a folder with an index looks like a whole one.
    _write_json(folder / "model_index.json", index | dict(spec.model_index))


def _models(spec: WanFolderSpec) -> dict[str, Any]:
    """Construct the modules of `spec` on the CPU in float32, by folder name; their weights are still the libraries'."""
    import diffusers
    import torch
    import transformers

    # The libraries draw from the global generator, and follow the ambient dtype and device.
    ambient = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            models = {
                "transformer": diffusers.WanTransformer3DModel.from_config(dict(spec.transformer)),
                "vae": diffusers.AutoencoderKLWan.from_config(dict(spec.vae)),
                "text_encoder": transformers.UMT5EncoderModel(transformers.UMT5Config(**spec.text_encoder)),
            }
            if spec.transformer_2 is not None:
                models["transformer_2"] = diffusers.WanTransformer3DModel.from_config(dict(spec.transformer_2))
            if spec.image_encoder is not None:
                config = transformers.CLIPVisionConfig(**spec.image_encoder)
                models["image_encoder"] = transformers.CLIPVisionModel(config)
    finally:
        torch.set_default_dtype(ambient)
    return models


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers' bar for writing shards off the terminal; a few megabytes need none."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tokenizer(text_length: int) -> Any:
    """Return a tokenizer with a token for each byte of UTF-8, so that it has every prompt; EOS ends a text as in T5."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, EOS, UNK, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[], unk_token=UNK)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS, UNK)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, tokens.index(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="right",
        truncation_side="right",
        model_max_length=text_length,
        clean_up_tokenization_spaces=False,
    )


def _fill(model: "torch.nn.Module", component: str, seed: int) -> None:
    """Draw every parameter of `model` anew, each from a generator of its own, so that their order is no matter."""
    import torch

    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        mean, deviation = _distribution(name, tuple(parameter.shape), isinstance(owner, torch.nn.Embedding))
        digest = hashlib.sha256(f"{seed}/{component}/{name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
        # Uniform, in separate steps: a normal's logarithms and a fused multiply-add differ between CPU types, and two
        # nodes must not build different models.
        noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float32).sub_(0.5)
        parameter.data.copy_(noise.mul_(deviation * math.sqrt(12)).add_(mean))


def _distribution(name: str, shape: tuple[int, ...], embedding: bool) -> tuple[float, float]:
    """Return mean and standard deviation of one parameter, from its name and shape."""
    owner, _, leaf = name.rpartition(".")
    if leaf == "scale_shift_table":
        return 0.0, 0.5  # the libraries' 1/sqrt(dim) all but closes the gates behind attention
    if owner.endswith(("norm_q", "norm_k", "norm_added_k")):
        return 1.5, 0.2  # logits with a deviation of about 2.25: peaked, and not the same in every head
    if leaf == "gamma" or (leaf == "weight" and len(shape) == 1):
        return 1.0, 0.05
    if leaf == "bias":
        # A padded text row is zero. Without these biases it stays a key of zeros; with them the norm would blow it up,
        # and some 490 equal keys would drown the prompt.
        silent = "text_embedder" in name or owner.endswith(("attn2.to_k", "attn2.add_k_proj"))
        return 0.0, 0.0 if silent else 0.05
    if embedding:
        return 0.0, 0.5 if "relative_attention_bias" in name else 1.0
    if leaf == "class_embedding":
        return 0.0, 1.0
    fan_in = math.prod(shape[1:])
    return 0.0, 1.0 / math.sqrt(fan_in)
