import instructor
from capital import Capital
from features import ASK, FEW, KEY, MODEL, V1, feature
from openai import OpenAI

plain = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
asked = {"model": MODEL, "messages": ASK, "max_tokens": FEW, "max_retries": 0, "response_model": Capital}


@feature
def tools():
    return instructor.from_openai(plain, mode=instructor.Mode.TOOLS).chat.completions.create(**asked)


@feature
def structured():
    return instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create(**asked)


@feature
def stream():
    made = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    asks = asked | {"response_model": instructor.Partial[Capital]}
    return [*made.chat.completions.create(**asks, stream=True)][-1].city
