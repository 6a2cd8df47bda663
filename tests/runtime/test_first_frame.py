"""Image files as people have them: what the model gets of each."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.check import read_image
from runtime.first_frame import first_frame, open_picture, picture_faults

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def stored(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def pixels(content: bytes) -> Any:
    picture = open_picture(content)
    assert picture.mode == "RGB"
    return np.asarray(picture).astype(int)


def halves(left: Any = RED, right: Any = BLUE, mode: str = "RGB") -> Image.Image:
    """48 x 32 pixels."""
    picture = Image.new(mode, (48, 32), left)
    picture.paste(right, (24, 0, 48, 32))
    return picture


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_orientation_that_a_camera_wrote_is_applied(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: the left half is on top
    shown = pixels(stored(halves(), kind, exif=exif))
    assert shown.shape == (48, 32, 3)
    assert np.abs(shown[4, 16] - RED).max() < 12
    assert np.abs(shown[44, 16] - BLUE).max() < 12


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_transparent_pixels_are_white(mode: str) -> None:
    if mode == "RGBA":
        content = stored(halves((*RED, 0), (*BLUE, 255), "RGBA"))
    elif mode == "LA":
        content = stored(halves((10, 0), (90, 255), "LA"))
    elif mode == "P":
        picture = halves(0, 1, "P")
        picture.putpalette([*RED, *BLUE])
        content = stored(picture, "GIF", transparency=0)
    else:
        colours = (RED, BLUE) if mode == "RGB" else (10, 90)
        content = stored(halves(*colours, mode), transparency=colours[0])
    shown = pixels(content)
    assert shown[4, 4].tolist() == [255, 255, 255]
    assert shown[4, 44].tolist() == ([90, 90, 90] if "L" in mode else list(BLUE))


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    assert pixels(stored(Image.new("RGBA", (4, 4), (*RED, 128))))[0, 0].tolist() == [255, 127, 127]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled(kind: str) -> None:
    grey = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    assert pixels(stored(Image.fromarray(grey), kind))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_grey_whose_white_is_unknown_is_refused() -> None:
    for picture, kind in (
        (Image.fromarray(np.array([[0, 70000]], dtype=np.int32)), "32-bit"),
        (Image.fromarray(np.array([[0.0, 1.0]], dtype=np.float32)), "floating-point"),
    ):
        (fault,) = picture_faults(stored(picture, "TIFF"))
        assert fault.key == "generate.image"
        assert kind in fault.rule


def test_palette_cmyk_and_black_and_white_become_rgb() -> None:
    palette = halves(0, 1, "P")
    palette.putpalette([*RED, *GREEN])
    assert pixels(stored(palette))[4, 44].tolist() == list(GREEN)
    cmyk = pixels(stored(halves((0, 255, 255, 0), (255, 255, 0, 0), "CMYK"), "TIFF"))
    assert (cmyk[4, 4].tolist(), cmyk[4, 44].tolist()) == (list(RED), list(BLUE))
    assert pixels(stored(halves(0, 1, "1")))[4, 44].tolist() == [255, 255, 255]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animated_picture_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN)]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    content = stored(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **lossless)
    assert pixels(content)[4, 4].tolist() == list(RED)


def fitted(content: bytes, fit: str | None, height: int = 32, width: int = 32) -> tuple[Any, str]:
    frame = first_frame(content, height, width, fit)
    with Image.open(io.BytesIO(frame.content)) as picture:
        assert (picture.mode, picture.size) == ("RGB", (width, height))
        return np.asarray(picture).astype(int), frame.note


def test_a_picture_is_cropped_around_its_centre_padded_or_stretched() -> None:
    thirds = Image.new("RGB", (96, 32), RED)
    thirds.paste(GREEN, (32, 0, 64, 32))
    thirds.paste(BLUE, (64, 0, 96, 32))
    content = stored(thirds)

    cropped, note = fitted(content, None)
    assert (cropped == GREEN).all()
    assert "its central 32x32 pixels are used" in note
    padded, note = fitted(content, "pad")
    assert (padded[0] == 0).all()
    assert (padded[-1] == 0).all()
    assert padded[16, 16].tolist() == list(GREEN)
    assert padded[16, 2].tolist() == list(RED)
    assert "black bars" in note
    stretched, note = fitted(content, "stretch")
    assert stretched[0, 2].tolist() == list(RED)
    assert stretched[31, 29].tolist() == list(BLUE)
    assert "stretched" in note


def test_a_picture_of_the_videos_proportions_is_scaled_without_a_word() -> None:
    for fit in (None, "crop", "pad", "stretch"):
        scaled, note = fitted(stored(halves()), fit, 16, 24)
        assert note == ""
        assert np.abs(scaled[8, 2] - RED).max() < 3


def test_the_same_picture_of_the_videos_size_is_left_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    kept, _ = fitted(stored(Image.fromarray(noise)), None, 32, 48)
    np.testing.assert_array_equal(kept, noise)


def test_a_file_that_is_cut_short_is_refused_with_its_path(tmp_path: Any) -> None:
    path = tmp_path / "cut.png"
    path.write_bytes(stored(halves(), "JPEG")[:-200])
    content, (fault,) = read_image(str(path))
    assert content is None
    assert (fault.key, fault.value) == ("generate.image", str(path))
