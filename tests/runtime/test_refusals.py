"""What cannot be served is refused in one message with value, rule and way out, early, and with the right exit code."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from configs.faults import FaultError
from runtime.model_folder import folder_of, read_folder
from tests.conftest import CHECKOUT
from tests.runtime.command import Outcome, raylysses
from tests.wan_folders import folder as tiny_folder

WITHOUT_TORCH_S = 10.0  # a second here; room for a loaded machine


def refuse(*settings: str, cwd: Path = CHECKOUT, environ: Mapping[str, str] | None = None) -> Outcome:
    return raylysses("generate", "--prompt", "a cat", *settings, cwd=cwd, environ=environ)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("generate.step=4", "generate.step=4: no such key; did you mean generate.steps?"),
        ("attention.per_role.slef=TORCH_SDPA", "did you mean self?"),
        ("attention.per_role.self=TORCH_SPDA", "did you mean TORCH_SDPA?"),
        ("model=tiny-wam", "did you mean tiny-wan?"),
        ("attention.per_role.self=SAGE_ATTN", "cuda:12.1 only, and this is cpu; use TORCH_SDPA"),
        ("generate.frames=16", "a video has 4n + 1 frames; use 13 or 17"),
        ("generate.height=100", "it must be a multiple of 16; use 96 or 112"),
        ("model.path=no/such/folder", "there is no such folder"),
        ("model.path=~/no-such-folder", f"model.path={Path.home()}/no-such-folder: there is no such folder"),
        ("model.path=black-forest-labs/FLUX.1-dev", "models of the Wan 2.1 and 2.2 families are served"),
        ("model.path=Some-Org/Wan-5B", "run `hf download Some-Org/Wan-5B --local-dir Wan-5B`; then model.path=Wan-5B"),
        ("generate.image=no.png", "it cannot be read"),
        ("generate.guidance_2=3", "the model has one stage"),
        ("generate.width=16400", "the model places at most 16384 pixels"),
        ("cluster.address=auto", "takes local, or HOST:PORT of a Ray head"),
        ("parallel.world_size=1,2", "is a sweep of 2 values"),
        ("parallel.transport=nccl", "it moves tensors of NVIDIA GPUs, and the ranks are on cpu; leave it on auto"),
        ("parallel.exchange_dtype=int8", "takes same or fp8"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(setting: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = refuse("run.device=cpu", f"run.dir={folder}", setting)

    assert outcome.code == 2, outcome.err
    assert outcome.err.count("error: ") == 1
    assert setting.partition("=")[0] in outcome.err
    assert message in outcome.err
    assert outcome.seconds < WITHOUT_TORCH_S
    assert not folder.exists()


def test_a_model_does_not_miss_the_image_that_cannot_be_read(tmp_path: Path) -> None:
    model = tiny_folder("wan2.1-i2v", tmp_path)
    outcome = refuse("run.device=cpu", f"model.path={model}", "generate.image=no.png", "generate.image_fit=crop")

    assert outcome.code == 2, outcome.err
    assert "generate.image=no.png: it cannot be read" in outcome.err
    assert outcome.err.count("generate.image") == 1
    assert "starts from an image" not in outcome.err


def test_an_exchange_that_a_strategy_cannot_quantise_is_refused_before_anything_starts() -> None:
    outcome = refuse("run.device=cpu", "parallel.world_size=2", "parallel.strategy=ring", "parallel.exchange_dtype=fp8")

    assert outcome.code == 2, outcome.err
    assert "parallel.exchange_dtype=fp8: ring 1x2 moves keys and values alone, and keys are never" in outcome.err


def test_faults_of_settings_image_folder_and_backends_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    settings = ("attention.per_role.self=SAGE_ATTN", "attention.per_role.cros=auto")
    outcome = refuse(*settings, "generate.frames=3", f"generate.image={tmp_path}/cut.png", "run.device=cpu")

    assert outcome.code == 2
    for key in ("attention.per_role.self", "attention.per_role.cros", "generate.frames"):
        assert outcome.err.count(f"error: {key}=") == 1, outcome.err
    assert "generate.image" in outcome.err


def test_all_faults_come_at_once() -> None:
    outcome = refuse("generate.step=4", "run.sed=7", "parallel.world_size=none")

    assert outcome.code == 2
    assert outcome.err.count("error: ") == 3


def test_a_run_never_writes_over_another(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("here")

    outcome = refuse(f"run.dir={tmp_path}")

    assert outcome.code == 2
    assert "run.dir" in outcome.err
    assert "not empty" in outcome.err


def test_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of("built-in:tiny-wan"), folder)
    weights = next((folder / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])

    outcome = refuse(f"model.path={folder}")

    assert outcome.code == 2
    assert f"transformer/{weights.name} has" in outcome.err
    assert outcome.seconds < WITHOUT_TORCH_S


def _break_index(folder: Path) -> None:
    (folder / "model_index.json").write_text('["not a mapping"]')


def _break_config(folder: Path) -> None:
    (folder / "transformer" / "config.json").write_text(
        '{"_class_name": "WanTransformer3DModel", "patch_size": [1, 0, 2]}'
    )


def _break_header(folder: Path) -> None:
    (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0[]")


def _break_link(folder: Path) -> None:
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    weights.symlink_to(folder / "nowhere")


def _break_shards(folder: Path) -> None:
    index = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "gone-00001-of-00002.safetensors", "b": 3}}')


def _break_class(folder: Path) -> None:
    (folder / "transformer" / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_break_index, "model_index.json is not a mapping"),
        (_break_config, "config.json cannot be read"),
        (_break_header, "has a damaged header"),
        (_break_link, "cannot be read"),
        (_break_shards, "gone-00001-of-00002.safetensors is missing"),
        (_break_class, "no model family"),
    ],
)
def test_a_broken_folder_is_refused_by_name(break_it: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of("built-in:tiny-wan"), folder)
    break_it(folder)

    with pytest.raises(FaultError) as caught:
        read_folder(str(folder))

    assert message in str(caught.value)
    assert all(fault.value == str(folder) for fault in caught.value.faults)


@pytest.mark.parametrize("missing", ["model_index.json", "transformer/config.json", "vae"])
def test_a_folder_that_lacks_a_part_is_refused(missing: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of("built-in:tiny-wan"), folder)
    target = folder / missing
    shutil.rmtree(target) if target.is_dir() else target.unlink()

    outcome = refuse(f"model.path={folder}")

    assert outcome.code == 2
    assert missing.split("/")[0] in outcome.err


def test_a_package_of_the_same_name_in_the_working_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("mine = True\n")

    outcome = installed_command("generate", "--prompt", "a cat", cwd=tmp_path)

    assert outcome.code == 2
    assert str(tmp_path / "configs") in outcome.err
    assert "run from another directory" in outcome.err
    assert outcome.seconds < WITHOUT_TORCH_S


def test_a_package_of_the_same_name_does_not_break_the_module_form(tmp_path: Path) -> None:
    """`python -m runtime` puts the working directory first, so there the driver itself would import the stranger."""
    for name in ("configs", "backends", "parallel", "runtime"):
        shutil.copytree(CHECKOUT / name, tmp_path / "checkout" / name)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("mine = True\n")

    outcome = module_command(tmp_path / "checkout", cwd=tmp_path)

    assert outcome.code == 2
    assert str(tmp_path / "configs") in outcome.err
    assert "Traceback" not in outcome.err


def installed_command(*arguments: str, cwd: Path) -> Outcome:
    """The console script's way in: the project is importable, the working directory is not on the path."""
    return _python(f"import sys; sys.path[0] = {str(CHECKOUT)!r}", *arguments, cwd=cwd)


def module_command(checkout: Path, cwd: Path) -> Outcome:
    """The working directory first, the project behind it."""
    return _python(f"import sys; sys.path[:1] = [{str(cwd)!r}, {str(checkout)!r}]", "explain", cwd=cwd)


def _python(path: str, *arguments: str, cwd: Path) -> Outcome:
    import subprocess
    import sys
    import time

    from tests.runtime.command import environment

    code = f"{path}; sys.argv[1:] = {list(arguments)!r}; from runtime.__main__ import main; sys.exit(main())"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment(), check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def test_a_missing_device_hides_no_other_fault(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    outcome = refuse(
        "run.device=cuda",
        "attention.per_role.slef=TORCH_SDPA",
        "generate.frames=7",
        f"run.dir={file}",
        environ={"PATH": str(tmp_path)},
    )

    assert outcome.code == 2, outcome.err
    for key in ("run.device=cuda", "attention.per_role.slef", "generate.frames=7", "run.dir="):
        assert outcome.err.count(f"error: {key}") == 1, outcome.err


def test_resources_alone_have_an_exit_code_of_their_own(tmp_path: Path) -> None:
    outcome = refuse("run.device=cuda", environ={"PATH": str(tmp_path)})

    assert outcome.code == 3, outcome.err
    assert outcome.err.count("error: ") == 1
