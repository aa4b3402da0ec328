"""An answer that fits a pydantic model: python structured_output.py.

The schema is a grammar for the sampler: no token that would leave it can be chosen.
"""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
)


class Review(BaseModel):
    sentiment: Literal["positive", "negative", "mixed"]
    stars: int = Field(ge=1, le=5)
    words: list[str] = Field(min_length=1, max_length=3)


text = "The room was clean and the breakfast excellent, but the street was loud all night."
done = client.chat.completions.parse(
    model="smollm2",
    messages=[{"role": "user", "content": f"Judge this review:\n{text}"}],
    response_format=Review,
    temperature=0,
    max_tokens=200,
)
print(done.choices[0].message.parsed)
