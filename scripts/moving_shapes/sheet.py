"""A picture of many videos: a strip of frames each, with what was asked for below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

STRIP_FRAMES = 6
_MARGIN, _GAP, _BAND, _FONT_SIZE = 12, 3, 18, 12
_PAPER, _INK, _WRONG = (255, 255, 255), (40, 40, 40), (190, 0, 0)


@dataclass(frozen=True)
class Strip:
    """frames: uint8 [H, W, 3], side by side with a gap. right: whether the video shows what its caption says."""

    frames: Any
    caption: str
    right: bool


def strip(frames: Any, caption: str, right: bool) -> Strip:
    """Evenly spaced frames of a video, uint8 [F, H, W, 3], from the first to the last."""
    chosen = frames[np.linspace(0, len(frames) - 1, STRIP_FRAMES).round().astype(int)]
    apart = np.pad(chosen, ((0, 0), (0, 0), (0, _GAP), (0, 0)), constant_values=_PAPER[0])
    return Strip(np.concatenate(apart, 1)[:, :-_GAP], caption, right)


def picture(strips: Sequence[Strip]) -> Image.Image:
    """The strips from top to bottom, in several columns if there are many; captions of wrong videos are red."""
    font = ImageFont.load_default(size=_FONT_SIZE)
    columns = 4 if len(strips) > 12 else 1
    rows = -(-len(strips) // columns)
    height, width = strips[0].frames.shape[:2]
    cell_width = max(width, *(round(font.getlength(one.caption)) for one in strips)) + _MARGIN
    cell_height = height + _BAND + _MARGIN
    sheet = Image.new("RGB", (_MARGIN + columns * cell_width, _MARGIN + rows * cell_height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for place, one in enumerate(strips):
        column, row = divmod(place, rows)
        left, top = _MARGIN + column * cell_width, _MARGIN + row * cell_height
        sheet.paste(Image.fromarray(one.frames), (left, top))
        draw.text((left, top + height + 1), one.caption, fill=_INK if one.right else _WRONG, font=font)
    return sheet


def write(strips: Sequence[Strip], path: Path) -> None:
    """Writes the picture in the format that the name ends in."""
    picture(strips).save(path)
