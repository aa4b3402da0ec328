import base64
import json

from capital import Capital
from features import ASK, FEW, KEY, MODEL, QUESTION, SCHEMA, TOOL, V1, argument, feature, pieces, until
from openai import OpenAI

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
asked = {"model": MODEL, "messages": ASK, "max_tokens": FEW}


@feature
def models():
    return [model.id for model in client.models.list()]


@feature
def chat():
    return client.chat.completions.create(**asked).choices[0].message.content


@feature
def stream():
    chunks = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *most, last = chunks
    assert last.usage.completion_tokens
    return pieces(chunk.choices[0].delta.content for chunk in most)


@feature
def tools():
    message = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required").choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    answer = client.chat.completions.create(**asked | {"messages": [*ASK, message, result]}, tools=[TOOL])
    assert answer.choices[0].message
    return argument(call.function.arguments)


@feature
def structured():
    return client.chat.completions.parse(**asked, response_format=Capital).choices[0].message.parsed


@feature
def logprobs():
    tokens = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    return all(len(token.top_logprobs) == 3 for token in tokens)


@feature
def completions():
    return client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=8).choices[0].text


@feature
def responses():
    whole = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=FEW)
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    called = client.responses.create(model=MODEL, input=QUESTION, tools=[tool], tool_choice="required")
    assert argument(called.output[-1].arguments)
    assert client.responses.parse(model=MODEL, input=QUESTION, text_format=Capital).output_parsed
    with client.responses.stream(model=MODEL, input="And of France?", previous_response_id=whole.id) as events:
        assert events.get_final_response().output_text
    return whole.output_text


@feature
def embeddings():
    return len(client.embeddings.create(model=MODEL, input=["The sea is calm."]).data[0].embedding)


@feature
def images():
    names = [model.id for model in client.models.list() if "images" in model.capabilities]
    made = client.images.generate(model=names[0], prompt="a red square", n=1)
    return base64.b64decode(made.data[0].b64_json)[1:4] == b"PNG"


@feature
def batches():
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = until(lambda one: one.completed_at or one.failed_at, lambda: client.batches.retrieve(batch.id))
    (answer,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    return answer["response"]["body"]["choices"][0]["message"]["content"]
