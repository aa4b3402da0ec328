from capital import Capital
from features import KEY, MODEL, QUESTION, V1, called, feature, weather
from strands import Agent, tool
from strands.models.openai import OpenAIModel

place = {"base_url": V1, "api_key": KEY}


def agent(**more):
    model = OpenAIModel(client_args=place, model_id=MODEL, params={"max_tokens": 48})
    return Agent(model=model, callback_handler=None, **more)


@feature
def stream():
    return str(agent()(QUESTION))


@feature
def structured():
    return agent().structured_output(Capital, QUESTION)


@feature
def tools():
    """The tools are offered; the model may say what it will."""
    return str(agent(tools=[tool(weather)])(QUESTION)) or called
