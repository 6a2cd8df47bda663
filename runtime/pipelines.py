"""diffusers pipelines whose transformer is on every rank, and whose encoders and VAE are on one."""

from __future__ import annotations

import importlib
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline

from backends.layer_facts import DenoisingTime
from configs.faults import Fault, FaultError
from parallel.mesh import Mesh
from parallel.transport.guard import exchange
from runtime.noise import seed_global, seeded_noise
from runtime.prompts import TEXT_TOKENS
from runtime.requests import Request

FIRST = 0
ENCODERS = ("text_encoder", "tokenizer", "image_encoder", "image_processor")


def from_first_rank(compute: Callable[[], tuple[Any, ...]], mesh: Mesh) -> tuple[Any, ...]:
    """What `compute` returns on the first rank, on every rank: tensors and None. The others do not call it."""
    if mesh.world_size == 1:
        return compute()
    result = compute() if mesh.rank == FIRST else ()
    layout = [[(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else None for t in result]]
    verb = "the broadcast of the first rank's tensors"
    with exchange(verb):
        dist.broadcast_object_list(layout, src=FIRST, group=mesh.control)
    received: list[torch.Tensor | None] = []
    for index, entry in enumerate(layout[0]):
        if entry is None:
            received.append(None)
            continue
        if mesh.rank == FIRST:
            tensor = result[index].to(mesh.device).contiguous()
        else:
            tensor = torch.empty(entry[0], dtype=entry[1], device=mesh.device)
        with exchange(verb):
            dist.broadcast(tensor, src=FIRST, group=mesh.data)
        received.append(tensor)
    return tuple(received)


class _OverRanks:
    """Mixed into a Wan pipeline: what needs an encoder or the VAE is computed on the first rank and broadcast.

    on_phase is told when encoding and denoising begin, and `denoising` the time of each step. The noise is drawn on the
    CPU, for the whole latent, from the request's generator (`noise`), so every rank holds the same.
    """

    mesh: Mesh
    on_phase: Callable[[str], None]
    denoising: DenoisingTime
    noise: torch.Generator

    @property
    def _execution_device(self) -> torch.device:
        return self.mesh.device

    def encode_prompt(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.on_phase("encode")
        return from_first_rank(lambda: super(_OverRanks, self).encode_prompt(*args, **kwargs), self.mesh)  # type: ignore[misc]

    def encode_image(self, *args: Any, **kwargs: Any) -> Any:
        return from_first_rank(lambda: (super(_OverRanks, self).encode_image(*args, **kwargs),), self.mesh)[0]  # type: ignore[misc]

    def begin_denoising(self) -> None:
        seed_global(self.noise)  # the first rank may have drawn for its encoders
        self.on_phase("denoise")
        self.denoising.begin(step_times(self.scheduler))  # type: ignore[attr-defined]


class TextToVideo(_OverRanks, WanPipeline):  # type: ignore[misc]
    """WanPipeline over ranks."""

    def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        latents = super().prepare_latents(*args, **kwargs)
        self.begin_denoising()
        return latents


class ImageToVideo(_OverRanks, WanImageToVideoPipeline):  # type: ignore[misc]
    """WanImageToVideoPipeline over ranks; the first frame goes through the VAE on the first rank."""

    def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        def prepare() -> tuple[Any, ...]:
            return *super(ImageToVideo, self).prepare_latents(*args, **kwargs), self.noise.get_state()

        *latents, state = from_first_rank(prepare, self.mesh)
        self.noise.set_state(state.cpu())  # the scheduler's steps go on from where the first rank's latents ended
        self.begin_denoising()
        return tuple(latents)


def step_times(scheduler: Any) -> list[float]:
    """The time of each step of a scheduler that has been set, from 1, which is noise, to 0.

    They are read off its device once, when they have just been put there.
    """
    steps = scheduler.config.num_train_timesteps
    return [timestep / steps for timestep in scheduler.timesteps.tolist()]


_CLASSES: dict[str, Any] = {"WanPipeline": TextToVideo, "WanImageToVideoPipeline": ImageToVideo}


def load_pipeline(
    folder: Path, pipeline: str, mesh: Mesh, dtype: torch.dtype, flow_shift: float | None, denoising: DenoisingTime
) -> Any:
    """The pipeline of a folder on one rank: transformers on all, text encoder, image encoder and VAE on the first.

    Transformers and text encoder are in `dtype`, VAE and image encoder in fp32, as their cards advise. The other
    ranks have the VAE's configuration without its weights. denoising: is told the time of each step.
    """
    absent: dict[str, Any] = {}
    if mesh.rank != FIRST:
        absent = {name: None for name in ENCODERS if name in ("text_encoder", "tokenizer") or pipeline != "WanPipeline"}
        with torch.device("meta"):
            absent["vae"] = AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(folder / "vae"))
    else:
        absent = {name: _whole_encoder(folder, name, kind) for name, kind in _encoder_dtypes(folder, dtype).items()}
    pipe = _CLASSES[pipeline].from_pretrained(
        folder,
        torch_dtype={"default": dtype, "vae": torch.float32, "image_encoder": torch.float32},
        local_files_only=True,
        **absent,
    )
    pipe.mesh = mesh
    pipe.denoising = denoising
    pipe.set_progress_bar_config(disable=True)
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module) and (mesh.rank == FIRST or module is not pipe.vae):
            module.to(mesh.device)
    if flow_shift is not None:
        pipe.scheduler = _shifted(pipe.scheduler, flow_shift)
    return pipe


def _encoder_dtypes(folder: Path, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The encoders that a folder has, and the dtype of each."""
    wanted = {"text_encoder": dtype, "image_encoder": torch.float32}
    return {name: kind for name, kind in wanted.items() if (folder / name / "config.json").is_file()}


def _whole_encoder(folder: Path, name: str, dtype: torch.dtype) -> Any:
    """A component of transformers, loaded. Left to itself the library fills tensors that are missing with noise."""
    library, class_name = json.loads((folder / "model_index.json").read_text())[name]
    model, report = getattr(importlib.import_module(library), class_name).from_pretrained(
        folder / name, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    lacking = sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])})
    if lacking:
        rule = (
            f"the weights of {name} lack {len(lacking)} tensors or have them in other shapes: {', '.join(lacking[:3])}"
        )
        raise FaultError([Fault("model.path", str(folder), rule, "copy the folder again")])
    return model


def _shifted(scheduler: Any, flow_shift: float) -> Any:
    for name in ("flow_shift", "shift"):
        if name in scheduler.config:
            return type(scheduler).from_config(scheduler.config, **{name: flow_shift})
    rule = f"the folder's scheduler, {type(scheduler).__name__}, has no shift"
    raise FaultError([Fault("generate.flow_shift", flow_shift, rule, "leave it at null")])


@dataclass
class PhaseClock:
    """Seconds by phase; a phase ends when the next begins. since: when the present one began."""

    announce: Callable[[str], None]
    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    since: float = 0.0
    _phase: str | None = None

    def enter(self, phase: str | None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self.since
        self._phase, self.since = phase, now
        if phase is not None:
            self.announce(phase)


@contextmanager
def clocked(pipe: Any, clock: PhaseClock) -> Iterator[None]:
    pipe.on_phase = clock.enter
    try:
        yield
    finally:
        clock.enter(None)
        pipe.denoising.end()


def denoise(pipe: Any, request: Request, clock: PhaseClock, on_step: Callable[[int, float], None]) -> torch.Tensor:
    """The latents of a request [1, C, F, H, W] in fp32, on every rank. Its image has the video's size. on_step gets the
    step, from 1, and its seconds.
    """
    pipe = _pipeline_for(pipe, request)
    last: float | None = None

    def after_step(_: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal last
        pipe.denoising.advance()
        if pipe.mesh.device.type == "cuda":
            torch.cuda.synchronize(pipe.mesh.device)  # or the estimate would be of launches, not of steps
        now = time.perf_counter()
        on_step(index + 1, now - (clock.since if last is None else last))
        last = now
        return {}

    image = {} if request.image is None else {"image": _image(request.image)}
    two_stage = {} if pipe.config.boundary_ratio is None else {"guidance_scale_2": request.guidance_2}
    with seeded_noise(pipe.scheduler, request.seed, pipe.mesh.device) as pipe.noise:
        (latents,) = pipe(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            height=request.height,
            width=request.width,
            num_frames=request.frames,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            generator=pipe.noise,
            max_sequence_length=TEXT_TOKENS,
            callback_on_step_end=after_step,
            output_type="latent",
            return_dict=False,
            **image,
            **two_stage,
        )
    return latents  # type: ignore[no-any-return]


def _pipeline_for(pipe: Any, request: Request) -> Any:
    """The pipeline that serves a request.

    A model that starts with or without a first frame gets another pipeline over the same parts for one with it.
    """
    if request.image is None or isinstance(pipe, ImageToVideo):
        return pipe
    options = {name: pipe.config[name] for name in ("boundary_ratio", "expand_timesteps")}
    sibling = ImageToVideo(**pipe.components, **options)
    sibling.mesh, sibling.denoising, sibling.on_phase = pipe.mesh, pipe.denoising, pipe.on_phase
    sibling.set_progress_bar_config(disable=True)
    return sibling


def _image(content: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(content))


@torch.no_grad()
def decode(pipe: Any, latents: torch.Tensor) -> Any:
    """Frames uint8 [F, H, W, 3] of latents [1, C, F, H, W]; on the first rank, which has the VAE."""
    vae = pipe.vae
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean, device=latents.device, dtype=vae.dtype).view(shape)
    std = torch.tensor(vae.config.latents_std, device=latents.device, dtype=vae.dtype).view(shape)
    video = vae.decode(latents.to(vae.dtype) * std + mean, return_dict=False)[0]
    frames = pipe.video_processor.postprocess_video(video, output_type="np")[0]
    return (frames * 255).round().astype("uint8")
