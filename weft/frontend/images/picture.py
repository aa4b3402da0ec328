"""A finished image."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from weft.frontend.images.png import png


class Image(Struct, frozen=True, kw_only=True):
    width: int
    height: int
    rgb: bytes
    """Row by row, the topmost first."""

    def png(self) -> bytes:
        return png(self.width, self.height, self.rgb)

    def save(self, path: str | Path) -> None:
        """Write it as a PNG file, whatever the name of the file says."""
        Path(path).write_bytes(self.png())
