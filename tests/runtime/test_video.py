from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from configs.faults import FaultError
from runtime.run_folder import RunFolder
from runtime.video import contact_sheet, encode_video, encoder_fault, sheet_frames, tile_size, wrapped


def moving_square(count: int, height: int, width: int) -> Any:
    frames = np.full((count, height, width, 3), (20, 60, 160), np.uint8)
    side = max(2, min(height, width) // 3)
    for index in range(count):
        left = round(index * (width - side) / max(1, count - 1))
        frames[index, height // 3 : height // 3 + side, left : left + side] = (230, 40, 30)
    return frames


def decoded(path: Path) -> tuple[dict[str, Any], Any]:
    reader = imageio_ffmpeg.read_frames(str(path))
    facts = next(reader)
    width, height = facts["source_size"]
    return facts, np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


@pytest.mark.parametrize(("height", "width", "fps"), [(48, 64, 16), (33, 47, 8), (2, 2, 24)])
def test_a_video_decodes_to_the_same_frames(tmp_path: Path, height: int, width: int, fps: int) -> None:
    frames = moving_square(13, height, width)
    encode_video(frames, fps, tmp_path / "video.mp4")
    facts, back = decoded(tmp_path / "video.mp4")
    assert facts["codec"] == "h264"
    assert facts["pix_fmt"].startswith("yuv420p")
    assert facts["fps"] == fps
    assert back.shape == (13, height + height % 2, width + width % 2, 3)
    shown = back[:, :height, :width].astype(int)
    # Flat areas come back as they were: the colours are converted and tagged alike.
    assert np.median(np.abs(shown - frames)) <= 2
    assert list(tmp_path.iterdir()) == [tmp_path / "video.mp4"]


def test_one_frame_is_a_video(tmp_path: Path) -> None:
    encode_video(moving_square(1, 16, 16), 16, tmp_path / "video.mp4")
    assert decoded(tmp_path / "video.mp4")[1].shape == (1, 16, 16, 3)


@pytest.mark.parametrize(
    "frames", [np.zeros((2, 8, 8, 3), np.float32), np.zeros((8, 8, 3), np.uint8), np.zeros((0, 8, 8, 3), np.uint8)]
)
def test_frames_of_another_form_are_refused(tmp_path: Path, frames: Any) -> None:
    with pytest.raises(ValueError, match=r"uint8 \[F, H, W, 3\]"):
        encode_video(frames, 16, tmp_path / "video.mp4")


def test_a_missing_encoder_is_a_fault_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert encoder_fault() is None
    for tool, rule in ((tmp_path / "none", "does not run"), (script(tmp_path, "echo ' V..... mpeg4'"), "no encoder")):
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tool))
        with pytest.raises(FaultError, match=rf"run\.outputs=video: .*{rule}.*run\.outputs=\[frames\]"):
            RunFolder(tmp_path).write_frames(moving_square(2, 8, 8), 8, ("video", "frames"))
        assert (tmp_path / "frames.png").exists()
        assert not (tmp_path / "video.mp4").exists()


def test_no_ffmpeg_at_all_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> str:
        raise RuntimeError("No ffmpeg exe could be found")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", nothing)
    fault = encoder_fault()
    assert fault is not None
    assert "pip install imageio-ffmpeg" in fault.remedy


def test_a_failing_encoder_leaves_no_half_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "case $* in *-encoders*) echo ' V..... libx264';; *) cat >/dev/null; echo 'disk is full' >&2; exit 3;; esac"
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(script(tmp_path, body)))
    with pytest.raises(FaultError, match=r"exit 3: disk is full"):
        encode_video(moving_square(2, 8, 8), 8, tmp_path / "video.mp4")
    assert [path.name for path in tmp_path.iterdir()] == ["tool"]


def script(folder: Path, body: str) -> Path:
    tool = folder / "tool"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    return tool


def test_the_sheet_spans_the_video_from_first_to_last_frame() -> None:
    assert sheet_frames(5) == (0, 1, 2, 3, 4)
    shown = sheet_frames(81)
    assert (len(shown), shown[0], shown[-1]) == (12, 0, 80)
    gaps = {after - before for before, after in itertools.pairwise(shown)}
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("size", "tile"),
    [
        ((32, 48), (128, 192)),
        ((60, 100), (180, 300)),
        ((128, 128), (128, 128)),
        ((480, 832), (295, 512)),
        ((4, 400), (8, 800)),
    ],
)
def test_small_frames_are_enlarged_by_a_whole_factor_and_large_ones_reduced(
    size: tuple[int, int], tile: tuple[int, int]
) -> None:
    assert tile_size(*size) == tile


def test_the_sheet_holds_the_frames_pixel_for_pixel_and_a_label_below_each(tmp_path: Path) -> None:
    frames = moving_square(17, 32, 48)
    RunFolder(tmp_path).write_frames(frames, 8, ("frames",))
    with Image.open(tmp_path / "frames.png") as image:
        assert image.size == (8 + 4 * (192 + 8), 8 + 3 * (128 + 20 + 8))
        sheet = np.asarray(image)
    for place, index in enumerate(sheet_frames(17)):
        top, left = 8 + place // 4 * 156, 8 + place % 4 * 200
        tile = sheet[top : top + 128, left : left + 192]
        np.testing.assert_array_equal(tile[::4, ::4], frames[index])
        label = sheet[top + 128 : top + 148, left : left + 192]
        assert label.max() > 200
        assert np.count_nonzero(label.max(axis=2) > 128) > 50


def test_a_short_video_has_a_small_sheet() -> None:
    assert contact_sheet(moving_square(2, 128, 128), 8).size == (8 + 2 * 136, 8 + 156)


def test_a_caption_makes_the_sheet_higher_and_leaves_the_frames_as_they_are() -> None:
    frames = moving_square(17, 32, 48)
    plain = np.asarray(contact_sheet(frames, 8))
    captioned = np.asarray(contact_sheet(frames, 8, ("a red circle moving right", "seed 7, model tiny-wan")))
    added = len(captioned) - len(plain)
    assert added == 2 * 17 + 8
    np.testing.assert_array_equal(captioned[added + 8 :], plain[8:])
    prompt, settings = captioned[8:25], captioned[25:42]
    assert np.count_nonzero(prompt.min(axis=2) > 128) > 100
    assert np.count_nonzero(settings.min(axis=2) > 128) > 100


def test_a_long_caption_is_wrapped_between_words_and_cut_with_an_ellipsis() -> None:
    assert wrapped("one two\nthree\x00four", len, 9) == ["one two", "three", "four"]
    assert wrapped("one two three four five", len, 9) == ["one two", "three", "four five"]
    assert wrapped("one two three four five six", len, 9) == ["one two", "three", "four fiv\u2026"]
    assert wrapped("\u732b" * 50, len, 20) == ["\u732b" * 20, "\u732b" * 20, "\u732b" * 10]
    assert wrapped("", len, 9) == []
    most = contact_sheet(moving_square(1, 16, 16), 8, ("word " * 5000,))
    assert most.size == (420, 8 + 3 * 17 + 8 + 128 + 28)


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ("", ""),
        ("\u732b\u304c\u8d70\u308b" * 40, "\u732b\u304c\u8d70\u308b" * 40),
        ("\u05d7\u05ea\u05d5\u05dc \u0642\u0637", "\u05d7\u05ea\u05d5\u05dc \u0642\u0637"),
        ("\U0001f469\u200d\U0001f680 \ud83d!", "\U0001f469\u200d\U0001f680 !"),
        ("a\x00b\r\nc", "a b c"),
    ],
)
def test_a_prompt_in_any_script_is_a_caption_and_is_whole_in_the_metadata(
    tmp_path: Path, prompt: str, kept: str
) -> None:
    RunFolder(tmp_path).write_frames(moving_square(2, 16, 16), 8, ("frames",), 0, (prompt, "seed 0"))
    with Image.open(tmp_path / "frames.png") as image:
        assert image.info["Description"] == f"{kept}\nseed 0"


def test_letters_beyond_ascii_are_drawn_as_themselves() -> None:
    boxes = contact_sheet(moving_square(1, 16, 16), 8, ("\uffff" * 4,))
    for text in ("\u00e9\u00fc\u00df\u00e7", "\u043a\u043e\u0448\u043a", "\u03b3\u03ac\u03c4\u03b1"):
        assert contact_sheet(moving_square(1, 16, 16), 8, (text,)).tobytes() != boxes.tobytes()
