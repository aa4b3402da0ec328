from features import ASK, FEW, KEY, MODEL, SCHEMA, TOOL, V1, argument, feature, pieces
from huggingface_hub import InferenceClient

client = InferenceClient(base_url=V1, api_key=KEY)
asked = {"messages": ASK, "model": MODEL, "max_tokens": FEW}


@feature
def chat():
    return client.chat_completion(**asked).choices[0].message.content


@feature
def stream():
    return pieces(part.choices[0].delta.content for part in client.chat_completion(**asked, stream=True))


@feature
def tools():
    answer = client.chat_completion(**asked, tools=[TOOL], tool_choice="required")
    return argument(answer.choices[0].message.tool_calls[0].function.arguments)


@feature
def structured():
    shape = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}}
    return argument(client.chat_completion(**asked, response_format=shape).choices[0].message.content)


@feature
def logprobs():
    return len(client.chat_completion(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs.content)
