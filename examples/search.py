"""Embeddings, and a search by them: python search.py ["ships at sea"].

The vectors are the language model's own hidden states. A model that was trained for embeddings gives better ones.
"""

import os
import sys

import numpy as np
from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
)
TEXTS = [
    "The harbour was full of sailing boats.",
    "Central banks raised interest rates again.",
    "Preheat the oven and butter the pan.",
    "The ferry crosses the strait every morning.",
    "The striker scored twice in the second half.",
]


def vectors(texts: list[str]) -> np.ndarray:
    made = client.embeddings.create(model="smollm2", input=texts, encoding_format="float")
    return np.array([each.embedding for each in made.data])


query = sys.argv[1] if len(sys.argv) > 1 else "ships at sea"
scores = vectors(TEXTS) @ vectors([query])[0]  # of length 1: their products are cosines
for place in np.argsort(-scores):
    print(f"{scores[place]:.3f}  {TEXTS[place]}")
