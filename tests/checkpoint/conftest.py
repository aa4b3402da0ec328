from tests.hub.conftest import weft_home

__all__ = ["weft_home"]
