"""PNG files: any picture comes back as it was, here and by another's reader."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from tests.api.openai.pixels import pixels_of
from weft.serving.image_request import Image, png


@st.composite
def pictures(draw: st.DrawFn) -> tuple[int, int, bytes]:
    width, height = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    size = 3 * width * height
    return width, height, draw(st.binary(min_size=size, max_size=size))


@given(pictures())
def test_a_picture_comes_back_as_it_was(picture: tuple[int, int, bytes]) -> None:
    width, height, rgb = picture
    file = png(width, height, rgb)
    assert pixels_of(file) == picture
    read = Pillow.open(io.BytesIO(file))
    assert (read.mode, read.size, read.tobytes()) == ("RGB", (width, height), rgb)


@pytest.mark.parametrize(("width", "height", "size"), [(2, 2, 11), (2, 2, 13), (0, 2, 0), (2, 0, 0), (-1, -2, 6)])
def test_what_is_no_picture_is_refused(width: int, height: int, size: int) -> None:
    with pytest.raises(ValueError, match="not an RGB image"):
        png(width, height, bytes(size))


def test_an_image_saves_itself(tmp_path: Path) -> None:
    image = Image(width=2, height=1, rgb=bytes(range(6)))
    image.save(tmp_path / "a.png")
    image.save(str(tmp_path / "b.png"))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes() == image.png()
    assert pixels_of(image.png()) == (2, 1, bytes(range(6)))
