from features import KEY, MODEL, QUESTION, V1, feature, pieces
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(MODEL, api_base=V1, api_key=KEY, max_tokens=64)
seen = []


@tool
def rain(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: The city whose weather is told.
    """
    seen.append(city)
    return f"It rains in {city}."


@feature
def chat():
    return model.generate([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]).content


@feature
def stream():
    asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    return pieces(part.content for part in model.generate_stream(asked))


@feature
def tools():
    """An agent forces a call by itself; its step ends with one that the agent has carried out."""
    agent = ToolCallingAgent([rain], model, max_steps=1, verbosity_level=0)
    agent.run(QUESTION)
    return [call.name for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or ()]
