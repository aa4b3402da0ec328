from anthropic import Anthropic
from features import ASK, FEW, KEY, MODEL, SCHEMA, URL, argument, feature, pieces, until

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
asked = {"model": MODEL, "messages": ASK, "max_tokens": FEW}
tool = {"name": "weather", "description": "Tell the weather of a city.", "input_schema": SCHEMA}


@feature
def models():
    return [model.display_name for model in client.models.list()]


@feature
def chat():
    return client.messages.create(**asked, system="Be brief.", metadata={"user_id": "one"}).content[0].text


@feature
def stream():
    with client.messages.stream(**asked) as events:
        text = pieces(events.text_stream)
        assert events.get_final_message().usage.output_tokens
    return text


@feature
def tools():
    once = {"type": "any", "disable_parallel_tool_use": True}
    (call,) = client.messages.create(**asked, tools=[tool], tool_choice=once).content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    told = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert client.messages.create(**asked | {"messages": told}, tools=[tool]).content
    return argument(call.input)


@feature
def structured():
    from capital import Capital

    return client.messages.parse(**asked, output_format=Capital).parsed_output


@feature
def count_tokens():
    return client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens


@feature
def batches():
    batch = client.messages.batches.create(requests=[{"custom_id": "1", "params": asked}])
    until(lambda one: one.processing_status == "ended", lambda: client.messages.batches.retrieve(batch.id))
    (answer,) = client.messages.batches.results(batch.id)
    return answer.result.message.content[0].text
