"""The first frame of a video, from the bytes of any image file: upright, opaque, 8-bit RGB, in the video's size."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.faults import Fault

if TYPE_CHECKING:
    from PIL import Image

KEY = "generate.image"
CROP, PAD, STRETCH = "crop", "pad", "stretch"
BACKGROUND = (255, 255, 255)
"""Shows through transparent pixels, as in a browser."""
BARS = (0, 0, 0)
_WHITE_16_BIT = 65535


@dataclass(frozen=True)
class FirstFrame:
    """A picture as the model gets it.

    Attributes:
        content: The bytes of a PNG file in the video's size.
        note: What was cropped, padded or stretched, as a line; empty if the picture had the video's proportions.
    """

    content: bytes
    note: str


def picture_faults(content: Any, value: str | None = None) -> list[Fault]:
    """Returns why bytes cannot serve as a first frame; value: what to call them, such as the path they came from."""
    if not isinstance(content, bytes):
        return [Fault(KEY, type(content).__name__, "takes bytes, the content of a file", "read the file")]
    from PIL import Image, UnidentifiedImageError

    name = f"{len(content)} bytes" if value is None else value
    try:
        open_picture(content)
    except UnidentifiedImageError:
        return [Fault(KEY, name, "it is not a picture", "give a PNG or JPEG file")]
    except (SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises for a damaged or a huge file
        return [Fault(KEY, name, f"it cannot be opened ({error})", "give a PNG or JPEG file")]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return [Fault(KEY, name, f"it cannot be read ({reason})", "give a whole PNG or JPEG file")]
    return []


def open_picture(content: bytes) -> Image.Image:
    """Returns the picture of an image file as 8-bit RGB; of an animated one, its first frame.

    The orientation that a camera wrote into the file is applied, transparent pixels show `BACKGROUND`, and 16-bit grey
    is scaled. Raises ValueError for pixels whose white is unknown, and what Pillow raises for a file that is damaged.
    """
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content)) as file:
        picture = ImageOps.exif_transpose(file)
        picture.load()
    if picture.mode.startswith(("I", "F")):
        picture = _eight_bit_grey(picture)
    if picture.has_transparency_data:
        opaque = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", opaque.size, (*BACKGROUND, 255)), opaque).convert("RGB")
    return picture.convert("RGB")


def _eight_bit_grey(picture: Image.Image) -> Image.Image:
    """Scales 16-bit grey; Pillow's own conversion would clip all above 255 to white."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(picture)
    if picture.mode.startswith("F") or pixels.min() < 0 or pixels.max() > _WHITE_16_BIT:
        kind = "floating-point" if picture.mode.startswith("F") else "32-bit"
        raise ValueError(f"its pixels are {kind} grey, whose white is unknown; save it in 8 bits")
    return Image.fromarray((pixels.astype(np.float64) * 255 / _WHITE_16_BIT).round().astype(np.uint8))


def first_frame(content: bytes, height: int, width: int, fit: str | None) -> FirstFrame:
    """Returns the picture of an image file in the size of a video, in pixels.

    Args:
        content: The bytes of an image file.
        height: Of the video.
        width: Of the video.
        fit: `crop` (also None) cuts off what exceeds the video's proportions, alike on both sides; `pad` adds black
            bars; `stretch` changes the proportions.
    """
    from PIL import Image, ImageOps

    picture = open_picture(content)
    size, resample = (width, height), Image.Resampling.LANCZOS
    if fit == PAD:
        fitted = ImageOps.pad(picture, size, resample, color=BARS)
    elif fit == STRETCH:
        fitted = picture.resize(size, resample)
    else:
        fitted = ImageOps.fit(picture, size, resample)
    fitted.info.clear()  # a colour profile of the file does not describe these pixels any more
    stream = io.BytesIO()
    fitted.save(stream, "PNG")
    return FirstFrame(stream.getvalue(), _note(picture.size, size, fit or CROP))


def _note(given: tuple[int, int], size: tuple[int, int], fit: str) -> str:
    """What a fit did to a picture; sizes are (width, height)."""
    if given[0] * size[1] == given[1] * size[0]:
        return ""
    scale = (max if fit == CROP else min)(size[0] / given[0], size[1] / given[1])
    used = f"{min(given[0], round(size[0] / scale))}x{min(given[1], round(size[1] / scale))}"
    ratio = f"the picture is {given[0]}x{given[1]} and the video {size[0]}x{size[1]}"
    done = {
        CROP: f"its central {used} pixels are used; generate.image_fit=pad keeps all of it",
        PAD: "black bars fill the rest",
        STRETCH: "it is stretched",
    }
    return f"{KEY}: {ratio}: {done[fit]}"
