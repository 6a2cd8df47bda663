"""Sessions on one live Ray: every Wan family over two ranks against stock diffusers, many requests, and what must not
pass.
"""

from __future__ import annotations

import io
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline
from safetensors.numpy import load_file, save_file

from backends.registrations import register_diffusion_backend
from configs.compose import compose
from configs.faults import FaultError
from configs.schema import RunConfig
from parallel.events import AttentionRan
from runtime import ray_api
from runtime.errors import DisagreementError, RankError
from runtime.group import RankGroup
from runtime.model_folder import folder_of
from runtime.requests import Generation, Request, request_of
from runtime.session import Observer, Session
from tests.runtime.command import gone_within
from tests.wan_folders import folder

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

TINY_WAN = folder_of("built-in:tiny-wan")
STEPS = 3
# 3 x 5 x 3 = 45 tokens, which two ranks do not divide; 160 x 96 is whole patches for a VAE of 8 and of 16 pixels.
SIZES = {8: (9, 80, 48), 16: (9, 160, 96)}


def config_of(path: Path, world_size: int = 2, spatial: int = 8, *settings: str) -> RunConfig:
    frames, height, width = SIZES[spatial]
    config, faults = compose(
        [
            f"model.path={path}",
            "generate.prompt='a red circle'",
            f"generate.steps={STEPS}",
            f"generate.frames={frames}",
            f"generate.height={height}",
            f"generate.width={width}",
            f"parallel.world_size={world_size}",
            "run.save_latents=true",
            "run.outputs=[]",
            "run.device=cpu",
            *settings,
        ],
        environ={},
    )
    assert config is not None, faults
    return config


def picture(height: int, width: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def stock_latents(path: Path, request: Request, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The same request through diffusers alone."""
    from PIL import Image

    kind = DiffusionPipeline if request.image is None else WanImageToVideoPipeline
    pipe = kind.from_pretrained(path, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    image = {} if request.image is None else {"image": Image.open(io.BytesIO(request.image))}
    two = {} if pipe.config.boundary_ratio is None else {"guidance_scale_2": request.guidance_2}
    (latents,) = pipe(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        num_frames=request.frames,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="latent",
        return_dict=False,
        **image,
        **two,
    )
    return np.asarray(latents.double())


def distance(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.float64(a) - np.float64(b)) / np.linalg.norm(np.float64(b)))


class Listener(Observer):
    def __init__(self) -> None:
        self.ran: list[tuple[int, AttentionRan]] = []
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_event(self, rank: int, event: Any) -> None:
        if isinstance(event, AttentionRan):
            self.ran.append((rank, event))


@pytest.mark.parametrize(
    ("name", "spatial", "roles"),
    [
        ("wan2.1-t2v", 8, {"self", "cross"}),
        ("wan2.1-i2v", 8, {"self", "cross", "cross.image"}),
        ("wan2.2-t2v-a14b", 8, {"self", "cross"}),
        ("wan2.2-ti2v-5b", 16, {"self", "cross"}),
    ],
)
def test_every_family_gives_over_two_ranks_what_diffusers_gives_alone(
    name: str, spatial: int, roles: set[str], tmp_path: Path
) -> None:
    path = folder(name, tmp_path)
    config = config_of(path, 2, spatial, "generate.guidance_2=2.0" if "a14b" in name else "generate.guidance=3.0")
    request = request_of(config, picture(*SIZES[spatial][1:]) if "i2v" in name and spatial == 8 else None)
    listener = Listener()

    with Session(config, observer=listener) as session:
        (made,) = session.generate([request])
        report = session.report

    assert distance(made.latents, stock_latents(path, request)) <= 1e-5
    assert {event.selection.role for _, event in listener.ran} == roles
    assert {event.model for _, event in listener.ran} == (
        {"transformer", "transformer_2"} if "a14b" in name else {"transformer"}
    )
    assert report.agreed
    assert {entry.role for entry in report.entries} == roles


def test_a_folder_that_takes_a_first_frame_serves_requests_with_and_without_one(tmp_path: Path) -> None:
    path = folder("wan2.2-ti2v-5b", tmp_path)
    config = config_of(path, 2, 16, "generate.guidance=3.0")
    without = request_of(config)
    requests = [without, replace(without, image=picture(*SIZES[16][1:])), without]

    with Session(config) as session:
        made = session.generate(requests)

    for request, video in zip(requests, made, strict=True):
        assert distance(video.latents, stock_latents(path, request)) <= 1e-5
    assert distance(made[1].latents, made[0].latents) > 0.1


def test_the_model_gets_the_centre_of_a_picture_of_other_proportions(tmp_path: Path) -> None:
    config = config_of(folder("wan2.1-i2v", tmp_path), 1)
    wide = np.asarray(PIL.Image.open(io.BytesIO(picture(80, 48))))
    stream = io.BytesIO()
    PIL.Image.fromarray(np.pad(wide, ((0, 0), (20, 20), (0, 0)))).save(stream, "PNG")
    cut, exact = request_of(config, stream.getvalue()), request_of(config, picture(80, 48))
    listener = Listener()

    with Session(config, observer=listener) as session:
        made = session.generate([cut, exact, replace(cut, image_fit="stretch")])

    assert distance(made[0].latents, made[1].latents) == 0.0
    assert made[0].request == cut
    np.testing.assert_array_equal(PIL.Image.open(io.BytesIO(made[0].first_frame or b"")), wide)
    assert distance(made[2].latents, made[1].latents) > 1e-3
    notes = [line for line in listener.messages if line.startswith("generate.image")]
    assert notes == [
        "generate.image: the picture is 88x80 and the video 48x80: its central 48x80 pixels are used; "
        "generate.image_fit=pad keeps all of it",
        "generate.image: the picture is 88x80 and the video 48x80: it is stretched",
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_built_in_model_gives_at_its_own_size_what_diffusers_gives_alone(world_size: int) -> None:
    size = ("generate.frames=33", "generate.height=128", "generate.width=128")
    run = ("run.save_latents=true", "run.outputs=[]", "run.device=cpu", f"parallel.world_size={world_size}")
    config, faults = compose(["generate.prompt='a red circle moving right'", "generate.steps=4", *size, *run])
    assert config is not None, faults
    request = request_of(config)

    with Session(config) as session:
        (made,) = session.generate([request])

    assert distance(made.latents, stock_latents(TINY_WAN, request)) <= 1e-5


def test_in_16_bits_two_ranks_are_as_near_to_fp32_as_one_is() -> None:
    config = config_of(TINY_WAN, 2, 8, "run.dtype=bfloat16")
    request = request_of(config)
    exact = stock_latents(TINY_WAN, request)

    with Session(config) as session:
        (made,) = session.generate([request])

    alone = distance(stock_latents(TINY_WAN, request, torch.bfloat16), exact)
    assert 0 < distance(made.latents, exact) <= 1.5 * alone


def test_one_group_serves_requests_of_other_sizes_and_prompts() -> None:
    config = config_of(TINY_WAN, 2)
    first = request_of(config)
    second = replace(first, prompt="a blue square", seed=3, frames=5, height=64, width=64)

    with Session(config) as session:
        together = session.generate([first, second])
        (again,) = session.generate([first])
        pids = [place.pid for place in session.places]

    assert together[0].latents.shape != together[1].latents.shape
    assert distance(again.latents, together[0].latents) == 0.0
    assert len(set(pids)) == 2


def test_a_request_that_cannot_be_served_is_refused_before_a_rank_starts_on_it() -> None:
    config = config_of(TINY_WAN, 1)

    with Session(config) as session:
        with pytest.raises(FaultError, match=r"generate\.frames=8"):
            session.generate([request_of(config), replace(request_of(config), frames=8)])
        for field, value, message in (
            ("steps", "3", r"generate\.steps='3': takes a whole number"),
            ("seed", -1, r"run\.seed=-1: takes a whole number"),
            ("prompt", None, r"generate\.prompt: is missing"),
            ("prompt", 5, r"generate\.prompt=5: takes text"),
            ("image", "first.png", r"generate\.image=str: takes bytes"),
            ("image", b"first.png", r"generate\.image=9 bytes: it is not a picture"),
            ("image", picture(48, 80), r"takes no image; .* names WanImageToVideoPipeline"),
            ("image_fit", "pad", r"generate\.image_fit=pad: without generate\.image nothing would use it"),
            ("image_fit", "fill", r"generate\.image_fit=fill: .*crop"),
        ):
            with pytest.raises(FaultError, match=message):
                session.generate([replace(request_of(config), **{field: value})])
        for wrong, told in ((request_of(config), "Request"), (["a red circle"], "a list of str"), ("a cat", "str")):
            with pytest.raises(TypeError, match=f"generate takes a list of Request, not {told};"):
                session.generate(wrong)  # type: ignore[arg-type]
        numbers = {"seed": np.int64(3), "guidance": np.float64(1.0), "steps": np.int32(2)}
        assert len(session.generate([replace(request_of(config), **numbers)])) == 1


def test_without_the_exchange_the_answer_is_another() -> None:
    config = config_of(TINY_WAN, 2)
    request = replace(request_of(config), frames=5, height=64, width=64)
    # 2 x 4 x 4 = 32 tokens, which two ranks divide: what a rank sends has the size of what it receives.

    with Session(config) as session:
        (right,) = session.generate([request])
    with Session(config, worker="tests.runtime.doubles.IdentityRank") as session:
        (wrong,) = session.generate([request])

    assert distance(wrong.latents, right.latents) > 1e-3


def test_a_rank_that_skips_a_layer_ends_the_run_by_its_own_error() -> None:
    config = config_of(TINY_WAN, 2)

    with Session(config, worker="tests.runtime.doubles.SkippingRank") as session:
        with pytest.raises(
            RankError, match=r"rank 1 .*LayerOrderError: transformer: blocks\.2\.attn2 was called, and it is"
        ):
            session.generate([request_of(config)])
        assert gone_within([place.pid for place in session.places], 10.0)
        with pytest.raises(RuntimeError, match="the session has no ranks now"):
            session.generate([request_of(config)])


def test_ranks_that_choose_differently_stop_the_run_with_both_sides_shown() -> None:
    config = config_of(TINY_WAN, 2, 8, "run.dtype=bfloat16")

    with (
        pytest.raises(DisagreementError) as caught,
        Session(config, worker="tests.runtime.doubles.OddFactsRank"),
    ):
        pass

    text = str(caught.value)
    assert "TORCH_SDPA/torch" in text
    assert "CUDNN_ATTN/cudnn" in text  # the package that it believes to have cannot be imported
    assert "rank 0" in text
    assert "rank 1" in text
    assert caught.value.exit_code == 4


def test_ranks_that_choose_differently_settle_on_what_all_can_run_if_they_may() -> None:
    config = config_of(TINY_WAN, 2, 8, "run.dtype=bfloat16", "attention.agreement=negotiate")

    with Session(config, worker="tests.runtime.doubles.OddFactsRank") as session:
        session.generate([request_of(config)])
        report = session.report

    assert report.agreed
    assert {(entry.backend, entry.source) for entry in report.entries} == {("TORCH_SDPA", "agreed")}
    rejected = {r["backend"]: r["faults"] for entry in report.entries for r in entry.rejected}
    assert set(rejected) == {"CUDNN_ATTN"}
    assert all("rank 0" in fault and "of cpu" in fault for faults in rejected.values() for fault in faults)


def test_ranks_of_which_some_fall_back_settle_as_well() -> None:
    wish = "attention.per_role.self={backend: CUDNN_ATTN, on_unsupported: fallback}"
    config = config_of(TINY_WAN, 2, 8, "run.dtype=bfloat16", "attention.agreement=negotiate", wish)

    with Session(config, worker="tests.runtime.doubles.OddFactsRank") as session:
        session.generate([request_of(config)])
        by_role = {entry.role: entry for entry in session.report.entries}

    assert (by_role["self"].backend, by_role["self"].requested) == ("TORCH_SDPA", "CUDNN_ATTN")
    assert by_role["self"].source == "agreed"


@pytest.mark.parametrize("agreement", ["require", "negotiate"])
def test_a_rank_that_was_given_another_class_stops_the_run(agreement: str) -> None:
    config = config_of(TINY_WAN, 2, 8, f"attention.agreement={agreement}", "attention.default=REFERENCE")

    with (
        pytest.raises(DisagreementError) as caught,
        Session(config, worker="tests.runtime.doubles.SwappedPathRank"),
    ):
        pass

    text = str(caught.value)
    assert "REFERENCE/plain" in text
    assert "REFERENCE/renamed" in text
    assert "rank 1" in text


@pytest.mark.parametrize(
    ("name", "class_name", "message"),
    [
        ("UNPORTABLE", "UnportableBackend", "TwoArgumentError: this and that"),
        ("NOT_A_NUMBER", "NotANumberBackend", "are not finite"),
        ("NARROW", "NarrowBackend", r"of NARROW returned torch.float32 \(1, 44, 2, 64\)"),
    ],
)
def test_what_a_backend_does_wrong_is_named(name: str, class_name: str, message: str) -> None:
    register = f"attention.register.{name}=tests.runtime.doubles.{class_name}"
    config = config_of(TINY_WAN, 2, 8, register, f"attention.per_role.self={name}")

    with pytest.raises(RankError, match=message) as caught, Session(config) as session:
        session.generate([request_of(config)])

    assert caught.value.trouble.kind == "raised"


def test_a_tensor_that_is_missing_from_the_text_encoder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(TINY_WAN, path)
    weights = path / "text_encoder" / "model.safetensors"
    tensors = load_file(weights)
    lost = next(name for name in tensors if "DenseReluDense.wo" in name)
    del tensors[lost]
    save_file(tensors, weights, metadata={"format": "pt"})

    with pytest.raises(RankError, match="text_encoder lack 1 tensors") as caught, Session(config_of(path, 1)):
        pass

    assert lost in str(caught.value)


def test_what_python_code_registers_reaches_the_ranks_by_name() -> None:
    """A built-in name with another class, and ranks that are processes of their own: they must run that class."""
    config = config_of(TINY_WAN, 2, 8, "attention.default=REFERENCE")
    with (
        register_diffusion_backend("REFERENCE", "tests.runtime.doubles.RenamedReferenceBackend"),
        Session(config) as session,
    ):
        session.generate([request_of(config)])
        entries = session.report.entries

    assert {entry.class_path for entry in entries} == {"tests.runtime.doubles.RenamedReferenceBackend"}
    assert {entry.variant for entry in entries} == {"renamed"}


def test_a_session_that_is_entered_again_after_an_error_knows_nothing_of_its_first_group(ray_cluster: str) -> None:
    config = config_of(TINY_WAN, 2)
    request = request_of(config)
    session = Session(config, worker="tests.runtime.doubles.SkippingRank")
    with pytest.raises(RankError), session:
        session.generate([request])
    assert session.report.entries

    session.config = config_of(TINY_WAN, 1)  # a smaller group
    session._worker = "runtime.worker.Rank"
    with session:
        assert session.report.entries == ()
        with pytest.raises(RuntimeError, match="leave it before you enter it again"):
            session.__enter__()
        _require_names_of_two_groups_side_by_side(session)
        session.generate([request])
        assert {rank for entry in session.report.entries for rank in entry.ranks} == {0}
        assert [place.rank for place in session.places] == [0]


def _require_names_of_two_groups_side_by_side(session: Session) -> None:
    """The dashboard tells the groups of one cluster apart."""
    from ray.util import list_named_actors, placement_group_table

    other = RankGroup(session.config.cluster)
    try:
        other.place(2, "cpu", ray_api.nodes())
        created = {group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"}
        ours = {name for name in created if re.fullmatch("raylysses-[0-9a-f]{8}", name)}
        actors = {name: {actor for actor in list_named_actors() if actor.startswith(name)} for name in ours}
        assert sorted(actors.values(), key=len) == [
            {f"{name}-process{bundle}" for bundle in range(count)}
            for count, name in sorted((len(found), name) for name, found in actors.items())
        ]
        assert sorted(map(len, actors.values())) == [1, 2]
    finally:
        other.close()


def test_a_session_can_be_entered_again_and_serves_only_inside() -> None:
    config = config_of(TINY_WAN, 1)
    request = request_of(config)
    session = Session(config)
    with pytest.raises(RuntimeError, match="no ranks now"):
        session.generate([request])

    with session:
        (first,) = session.generate([request])
    with pytest.raises(RuntimeError, match="no ranks now"):
        session.generate([request])
    with session:
        (second,) = session.generate([request])

    assert distance(first.latents, second.latents) == 0.0


class _Finished(Observer):
    def __init__(self) -> None:
        self.indices: list[int] = []

    def on_generation(self, index: int, generation: Generation) -> None:
        assert generation.latents is not None
        self.indices.append(index)


def test_a_request_that_fails_loses_no_finished_one() -> None:
    config = config_of(TINY_WAN, 1)
    first, observer = request_of(config), _Finished()
    session = Session(config, observer=observer, worker="tests.runtime.doubles.SecondRequestFails")

    with pytest.raises(RankError, match="the second request fails"), session:
        session.generate([first, first])

    assert [generation.request for generation in session.finished] == [first]
    assert session.finished[0].latents is not None
    assert observer.indices == [0]
