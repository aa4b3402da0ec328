"""An answer's form, for the clients that take a class of pydantic's."""

from features import City
from pydantic import BaseModel


class Capital(BaseModel):
    """The capital of a country."""

    city: City
