from features import ASK, FEW, MODEL, SCHEMA, TOOL, URL, argument, feature, pieces
from ollama import Client

client = Client(host=URL)
few = {"num_predict": FEW}


@feature
def models():
    return [model.model for model in client.list().models]


@feature
def chat():
    return client.chat(MODEL, ASK, options=few).message.content


@feature
def stream():
    return pieces(part.message.content for part in client.chat(MODEL, ASK, options=few, stream=True))


@feature
def tools():
    """Ollama's protocol has no tool_choice: the tools are taken, and the model may say what it will."""
    message = client.chat(MODEL, ASK, tools=[TOOL], options=few).message
    return message.tool_calls or message.content


@feature
def structured():
    return argument(client.chat(MODEL, ASK, format=SCHEMA, options=few).message.content)


@feature
def completions():
    return client.generate(MODEL, "One, two, three,", raw=True, options=few).response


@feature
def embeddings():
    return len(client.embed(MODEL, "The sea is calm.").embeddings[0])
