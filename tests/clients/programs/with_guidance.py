from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, V1, feature
from guidance import assistant, gen, select, user
from guidance import json as gen_json
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel


def asked(model, what):
    with user():
        model += QUESTION
    with assistant():
        model += what
    return model["answer"]


@feature
def chat():
    return asked(OpenAI(MODEL, api_key=KEY, base_url=V1, echo=False), gen("answer", max_tokens=FEW))


@feature
def structured():
    """By a JSON schema, and by a grammar that vLLM's interface takes."""
    shape = gen_json("answer", schema=Capital)
    assert Capital.model_validate_json(asked(OpenAI(MODEL, api_key=KEY, base_url=V1, echo=False), shape))
    over_vllm = VLLMModel(MODEL, base_url=V1, api_key=KEY, echo=False)
    return asked(over_vllm, select(["Berlin", "Paris"], name="answer"))
