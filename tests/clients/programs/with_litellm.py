import sys

import litellm
from capital import Capital
from features import ASK, FEW, KEY, MODEL, QUESTION, TOOL, URL, V1, argument, feature, pieces

(protocol,) = sys.argv[1:]
base = URL if protocol in ("anthropic", "ollama_chat") else V1
asked = {"model": f"{protocol}/{MODEL}", "api_base": base, "api_key": KEY, "max_tokens": FEW}


@feature
def chat():
    return litellm.completion(messages=ASK, **asked).choices[0].message.content


@feature
def stream():
    return pieces(part.choices[0].delta.content for part in litellm.completion(messages=ASK, stream=True, **asked))


@feature
def tools():
    answer = litellm.completion(messages=ASK, tools=[TOOL], tool_choice="required", **asked)
    return argument(answer.choices[0].message.tool_calls[0].function.arguments)


@feature
def structured():
    text = litellm.completion(messages=ASK, response_format=Capital, **asked).choices[0].message.content
    return Capital.model_validate_json(text)


if protocol == "hosted_vllm":

    @feature
    def embeddings():
        made = litellm.embedding(model=asked["model"], api_base=V1, api_key=KEY, input=["The sea is calm."])
        return len(made.data[0]["embedding"])

    @feature
    def responses():
        asks = {"api_base": V1, "api_key": KEY, "max_output_tokens": FEW}
        return litellm.responses(model=f"openai/{MODEL}", input=QUESTION, **asks).output[0].content[0].text
