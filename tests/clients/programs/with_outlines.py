import outlines
from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, V1, City, feature, pieces
from openai import OpenAI

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
over_openai = outlines.from_openai(client, MODEL)
over_vllm = outlines.from_vllm(client, MODEL)


@feature
def chat():
    return over_openai(QUESTION, max_tokens=FEW)


@feature
def stream():
    return pieces(over_openai.stream(QUESTION, max_tokens=FEW))


@feature
def structured():
    """By OpenAI's response_format, and by vLLM's own fields."""
    assert Capital.model_validate_json(over_openai(QUESTION, Capital, max_tokens=FEW))
    assert over_vllm(QUESTION, City, max_tokens=FEW) in ("Berlin", "Paris")
    return Capital.model_validate_json(over_vllm(QUESTION, Capital, max_tokens=FEW))
