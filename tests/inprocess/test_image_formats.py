"""Which images of rows are decoded: PNG, JPEG and TIFF of the size that info.json declares, looked at before pixels."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from raypipe.decode import decode_image
from raypipe.errors import DecodeError
from raypipe.format import Feature

CAMERA = Feature(name="observation.images.top", kind="image", dtype="uint8", shape=(3, 48, 64))
PLACE = "episode 2, frame 5 of 'root'"


def image_of(form, width=64, height=48):
    stream = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 80, np.uint8)).save(stream, form)
    return stream.getvalue()


def png_that_claims(width, height):
    """A PNG of a few bytes whose header claims a size."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF"])
def test_an_image_of_a_known_format_is_decoded(form):
    assert abs(decode_image(image_of(form), CAMERA, PLACE).float() - 80).max() < 2


@pytest.mark.parametrize("form", ["BMP", "GIF", "PPM", "TGA", "ICO", "EPS"])
def test_an_image_of_another_format_is_the_error_of_its_frame(form, monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **more: started.append(given))

    with pytest.raises(DecodeError, match=r"not a PNG, JPEG or TIFF.*") as refused:
        decode_image(image_of(form), CAMERA, PLACE)

    assert PLACE in str(refused.value)
    assert CAMERA.name in str(refused.value)
    assert not started


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(13_000, 13_000), (64, 49)])
def test_an_image_that_claims_more_pixels_than_info_declares_is_not_decoded(width, height, monkeypatch):
    monkeypatch.setattr(Image.Image, "convert", lambda *given: pytest.fail("decoded"))

    with pytest.raises(DecodeError, match=rf"{width}x{height}.*info\.json.*64x48"):
        decode_image(png_that_claims(width, height), CAMERA, PLACE)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_where_info_tells_no_size_a_stated_limit_holds():
    unknown = Feature(name=CAMERA.name, kind="image", dtype="uint8", shape=(3, 0, 0))

    assert decode_image(image_of("PNG"), unknown, PLACE).shape == (48, 64, 3)
    with pytest.raises(DecodeError, match="13000x13000"):
        decode_image(png_that_claims(13_000, 13_000), unknown, PLACE)
