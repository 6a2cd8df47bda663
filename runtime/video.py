"""Writes frames for people: an H.264 video, and a contact sheet of frames from all of the video."""

from __future__ import annotations

import math
import os
import subprocess
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.faults import Fault, FaultError

if TYPE_CHECKING:
    from PIL import Image, ImageFont

ENCODER = "libx264"
SHEET_FRAMES = 12
SHEET_COLUMNS = 4
SMALLEST_TILE = 128
LARGEST_TILE = 512
WIDEST_UPSCALE = 1024
FONT_SIZE = 12
CAPTION_LINES = 3
CAPTION_LINE = 17
NARROWEST_CAPTIONED = 420
ELLIPSIS = "\u2026"
WITHOUT_VIDEO = "or leave the video out with run.outputs=[frames]"
_COLOURS = ("-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv")


def encoder_fault() -> Fault | None:
    """Why no video can be written on this machine; None if one can. To be asked before a run starts."""
    import imageio_ffmpeg

    try:
        tool = imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError:
        remedy = f"install it with `pip install imageio-ffmpeg`, {WITHOUT_VIDEO}"
        return Fault("run.outputs", "video", "no ffmpeg is on this machine", remedy)
    try:
        listed = subprocess.run([tool, "-hide_banner", "-encoders"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        remedy = f"point IMAGEIO_FFMPEG_EXE to an ffmpeg that runs, or unset it, {WITHOUT_VIDEO}"
        return Fault("run.outputs", "video", f"the ffmpeg at {tool} does not run ({error})", remedy)
    if ENCODER not in listed.split():
        remedy = f"unset IMAGEIO_FFMPEG_EXE and run `pip install imageio-ffmpeg`, {WITHOUT_VIDEO}"
        return Fault("run.outputs", "video", f"the ffmpeg at {tool} has no encoder {ENCODER} (H.264)", remedy)
    return None


def check_frames(frames: Any) -> None:
    """Raises ValueError unless `frames` is uint8 [F, H, W, 3] with at least one frame."""
    shape = tuple(frames.shape)
    if str(frames.dtype) != "uint8" or len(shape) != 4 or shape[3] != 3 or 0 in shape:
        rule = "a video takes uint8 [F, H, W, 3] with at least one frame"
        raise ValueError(f"frames={frames.dtype} {list(shape)}: {rule}; convert the decoder's output first")


def encode_video(frames: Any, fps: float, path: Path) -> None:
    """Writes uint8 [F, H, W, 3] as H.264 in yuv420p, which every player takes; the file appears when it is complete.

    yuv420p has even sizes only: an odd width or height gets its last column or row twice. Raises FaultError without an
    encoder, or if ffmpeg fails.
    """
    import imageio_ffmpeg
    import numpy as np

    check_frames(frames)
    fault = encoder_fault()
    if fault is not None:
        raise FaultError([fault])
    height, width = frames.shape[1:3]
    even = np.ascontiguousarray(np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge"))
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    source = [
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-s",
        f"{even.shape[2]}x{even.shape[1]}",
        "-r",
        f"{fps:g}",
        "-i",
        "-",
    ]
    # Untagged RGB becomes BT.601, which players show as BT.709 with a colour cast: convert to BT.709 and say so.
    target = ["-an", "-vf", "scale=out_color_matrix=bt709:out_range=tv", "-c:v", ENCODER, "-pix_fmt", "yuv420p"]
    quality = ["-crf", "16", "-movflags", "+faststart"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *source, *target, *_COLOURS, *quality, str(part)]
    done = subprocess.run(command, input=even.data.cast("B"), capture_output=True)
    if done.returncode != 0:
        part.unlink(missing_ok=True)
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        rule = f"ffmpeg could not write {path} (exit {done.returncode}: {said[-1]})"
        raise FaultError([Fault("run.outputs", "video", rule, f"free disk space there, {WITHOUT_VIDEO}")])
    os.replace(part, path)


def sheet_frames(count: int) -> tuple[int, ...]:
    """The frames of a contact sheet: all of them, or 12 spread evenly from the first to the last."""
    if count <= SHEET_FRAMES:
        return tuple(range(count))
    return tuple(round(place * (count - 1) / (SHEET_FRAMES - 1)) for place in range(SHEET_FRAMES))


def tile_size(height: int, width: int) -> tuple[int, int]:
    """(height, width) of a frame on the sheet: small ones by a whole factor to 128 or more, large ones down to 512."""
    shortest, longest = min(height, width), max(height, width)
    if longest > LARGEST_TILE:
        scale = LARGEST_TILE / longest
        return max(1, round(height * scale)), max(1, round(width * scale))
    # A strip is not blown up beyond reason for its short side's sake.
    factor = max(1, min(math.ceil(SMALLEST_TILE / shortest), WIDEST_UPSCALE // longest))
    return height * factor, width * factor


def contact_sheet(frames: Any, fps: float, caption: Sequence[str] = ()) -> Image.Image:
    """Draw up to 12 evenly spaced frames in a grid, each above its number (from 0) and its time.

    Args:
        frames: uint8 [F, H, W, 3].
        fps: Frames per second.
        caption: Paragraphs above the frames. Each is wrapped, and cut with an ellipsis after three lines. Characters
            that the font lacks (Chinese, Japanese and Korean ones, most emoji) are drawn as boxes.

    Returns:
        The sheet as an RGB image.
    """
    from PIL import Image, ImageDraw

    check_frames(frames)
    shown = sheet_frames(len(frames))
    labels = [f"frame {index}  {index / fps:.2f} s" for index in shown]
    font = _font()
    height, width = tile_size(*frames.shape[1:3])
    margin, band = 8, 20
    cell = max(width, *(math.ceil(font.getlength(label)) for label in labels))
    columns = min(SHEET_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    sheet_width = max(margin + columns * (cell + margin), NARROWEST_CAPTIONED if caption else 0)
    paragraphs = [wrapped(paragraph, font.getlength, sheet_width - 2 * margin) for paragraph in caption]
    grid_top = margin + (CAPTION_LINE * sum(map(len, paragraphs)) + margin if caption else 0)
    sheet = Image.new("RGB", (sheet_width, grid_top + rows * (height + band + margin)), (24, 24, 24))
    draw = ImageDraw.Draw(sheet)
    top = margin
    for paragraph, lines in enumerate(paragraphs):
        for line in lines:
            draw.text((margin, top), line, fill=(170, 170, 170) if paragraph else (255, 255, 255), font=font)
            top += CAPTION_LINE
    enlarged = width >= frames.shape[2]
    filter_ = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
    for place, (index, label) in enumerate(zip(shown, labels, strict=True)):
        row, column = divmod(place, columns)
        left, top = margin + column * (cell + margin), grid_top + row * (height + band + margin)
        sheet.paste(Image.fromarray(frames[index]).resize((width, height), filter_), (left, top))
        draw.text((left, top + height + 3), label, fill=(230, 230, 230), font=font)
    return sheet


def wrapped(text: str, length: Callable[[str], float], width: float) -> list[str]:
    """Break a paragraph into at most three lines, between words where it has spaces.

    Args:
        text: One paragraph. Line breaks, control characters and lone surrogates count as spaces.
        length: The width of a text in pixels.
        width: The width of a line in pixels.

    Returns:
        The lines; the last one ends in an ellipsis if text was left out.
    """
    rest = _printable(text)
    lines: list[str] = []
    while rest and len(lines) < CAPTION_LINES:
        end = 1
        while end < len(rest) and length(rest[: end + 1]) <= width:
            end += 1
        if end < len(rest):
            space = rest.rfind(" ", 0, end + 1)
            end = space if space > 0 else end
        lines.append(rest[:end])
        rest = rest[end:].lstrip()
    if rest:
        last = lines[-1]
        while last and length(last + ELLIPSIS) > width:
            last = last[:-1]
        lines[-1] = last.rstrip() + ELLIPSIS
    return lines


def write_contact_sheet(frames: Any, fps: float, path: Path, caption: Sequence[str] = ()) -> None:
    """Write `contact_sheet` as a PNG, which has the whole caption in its metadata (`Description`).

    The file appears when it is complete.
    """
    from PIL.PngImagePlugin import PngInfo

    metadata = PngInfo()
    if caption:
        metadata.add_itxt("Description", "\n".join(map(_printable, caption)))
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    contact_sheet(frames, fps, caption).save(part, format="PNG", pnginfo=metadata)
    os.replace(part, path)


def _printable(text: str) -> str:
    """The text without control characters and lone surrogates, which neither fonts nor PNG files take."""
    kept = (" " if unicodedata.category(character) in ("Cc", "Cs") else character for character in text)
    return " ".join("".join(kept).split())


def _font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib: Pillow's own font has ASCII only."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), size=FONT_SIZE)
