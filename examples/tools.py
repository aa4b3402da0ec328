"""A tool call, its result, and the answer: python tools.py.

`tool_choice` forces the call here: the default model is too small to decide by itself. A forced call always fits the
schema of its tool.
"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
)


def weather(city: str) -> str:
    return f"It rains in {city}, 12 degrees."


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Berlin", "Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = client.chat.completions.create(
    model="smollm2", messages=messages, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=64
).choices[0]
messages.append(asked.message.model_dump(exclude_none=True))
for call in asked.message.tool_calls:
    result = weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = client.chat.completions.create(
    model="smollm2", messages=messages, tools=[TOOL], tool_choice="none", temperature=0, max_tokens=64
)
print(answer.choices[0].message.content)
