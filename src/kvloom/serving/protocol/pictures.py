"""Pictures of a chat: reading data URLs of a request, and decoding them within limits."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import summary_of
from kvloom.serving.protocol.fields import shown

MOST_PICTURES: Final = 16
"""Largest number of pictures in a chat."""

MOST_PIXELS: Final = 1 << 25
"""Largest number of pixels of all pictures of a chat together, 96 MiB when decoded."""

_FORMATS: Final = ("PNG", "JPEG", "WEBP")
_TYPES: Final = ("image/png", "image/jpeg", "image/jpg", "image/webp")
_HEADERS: Final = tuple(f"data:{kind};base64" for kind in _TYPES)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a request.

    Attributes:
        name: Name of its field.
        data: Its bytes in base64.
    """

    name: str
    data: str


def picture_of(name: str, part: dict[str, Any]) -> Picture:
    """The picture of a part of a message; nothing is decoded.

    Args:
        name: Name of the part.
        part: Part of type ``image_url``.

    Raises:
        ArgumentError: the part has another field, or its URL is no ``data:`` URL of a PNG, JPEG or WebP.
    """
    name, given = f"{name}.image_url", part.get("image_url")
    if part.keys() != {"type", "image_url"} or not isinstance(given, dict):
        raise ArgumentError(f"{name} must be an object beside a type alone, got {shown(part)}")
    for field, value in given.items():
        if field not in ("url", "detail"):
            raise ArgumentError(f"{name} must have fields that are supported, got {shown(field)}")
        if field == "detail" and value not in (None, "auto"):
            raise ArgumentError(
                f"{name}.detail must be 'auto', as others are not supported, got {shown(value)}"
            )
    header, comma, data = str(given.get("url")).partition(",")
    if not comma or header.lower() not in _HEADERS:
        raise ArgumentError(
            f"{name}.url must be data:TYPE;base64,... with a TYPE of {', '.join(_TYPES)}, as nothing is "
            f"fetched from elsewhere, got {shown(given.get('url'))}"
        )
    return Picture(name, data)


def decoded(pictures: Sequence[Picture]) -> list[Any]:
    """Decoded images of Pillow in RGB, rotated by their EXIF orientation.

    Args:
        pictures: Pictures of one chat.

    Raises:
        ArgumentError: there are too many pictures or pixels, which is checked before decoding, or a picture
            is broken, animated, or of another format.
    """
    from PIL import Image, ImageOps

    if len(pictures) > MOST_PICTURES:
        raise ArgumentError(f"messages must have at most {MOST_PICTURES} pictures, got {len(pictures)}")
    opened, num_pixels = [], 0
    for picture in pictures:
        try:
            file = io.BytesIO(base64.b64decode(picture.data, validate=True))
            image = Image.open(file, formats=_FORMATS)  # reads the head alone
            num_frames = 1 if image.format == "JPEG" else getattr(image, "n_frames", 1)
        except Exception as error:  # whatever bytes make Pillow raise
            raise _broken(picture, error) from error
        if num_frames > 1:
            raise ArgumentError(f"{picture.name} must be one picture, got {num_frames} frames")
        num_pixels += image.width * image.height
        if num_pixels > MOST_PIXELS:
            raise ArgumentError(
                f"{picture.name} must be small enough that all pictures have at most {MOST_PIXELS} pixels, "
                f"got {image.width} x {image.height}"
            )
        opened.append(image)
    images = []
    for picture, image in zip(pictures, opened, strict=True):
        try:
            images.append(ImageOps.exif_transpose(image).convert("RGB"))
        except Exception as error:
            raise _broken(picture, error) from error
    return images


def _broken(picture: Picture, error: Exception) -> ArgumentError:
    what = "neither of them" if type(error).__name__ == "UnidentifiedImageError" else summary_of(error)
    return ArgumentError(f"{picture.name} must be a whole PNG, JPEG or WebP, got {what}")
