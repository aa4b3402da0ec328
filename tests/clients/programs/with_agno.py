from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, V1, feature, pieces

model = OpenAILike(id=MODEL, base_url=V1, api_key=KEY, max_tokens=FEW)


@feature
def chat():
    return Agent(model=model, telemetry=False).run(QUESTION).content


@feature
def stream():
    return pieces(event.content for event in Agent(model=model, telemetry=False).run(QUESTION, stream=True))


@feature
def structured():
    shaped = OpenAILike(id=MODEL, base_url=V1, api_key=KEY, max_tokens=FEW, supports_native_structured_outputs=True)
    return Agent(model=shaped, output_schema=Capital, telemetry=False).run(QUESTION).content.city
