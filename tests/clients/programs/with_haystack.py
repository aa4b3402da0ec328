from features import FEW, KEY, MODEL, QUESTION, SCHEMA, V1, argument, feature, pieces, weather
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

place = {"api_key": Secret.from_token(KEY), "api_base_url": V1}
tool = Tool("weather", "Tell the weather of a city.", SCHEMA, weather)


def asked(more=None, **settings):
    made = OpenAIChatGenerator(model=MODEL, **place, generation_kwargs={"max_tokens": FEW} | (more or {}), **settings)
    return made.run([ChatMessage.from_user(QUESTION)])["replies"][0]


@feature
def chat():
    return asked().text


@feature
def stream():
    texts = []
    asked(streaming_callback=lambda chunk: texts.append(chunk.content))
    return pieces(texts)


@feature
def tools():
    return argument(asked({"tool_choice": "required"}, tools=[tool]).tool_calls[0].arguments)


@feature
def structured():
    shape = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}}
    return argument(asked({"response_format": shape}).text)


@feature
def embeddings():
    return len(OpenAITextEmbedder(model=MODEL, **place).run("The sea is calm.")["embedding"])
