"""An agent with a tool, by LangChain: python agent.py ["What is 7 times 6?"].

The model may call tools until it answers. Its first call is forced: the default model is too small to decide by itself.
"""

import os
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def multiply(first: int, second: int) -> int:
    """Multiply two whole numbers."""
    return first * second


model = ChatOpenAI(
    model="smollm2",
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
    temperature=0,
    max_tokens=64,
)
messages = [HumanMessage(sys.argv[1] if len(sys.argv) > 1 else "What is 7 times 6?")]
answer = model.bind_tools([multiply], tool_choice="any").invoke(messages)
for _ in range(4):
    if not answer.tool_calls:
        break
    messages.append(answer)
    for call in answer.tool_calls:
        result = multiply.invoke(call["args"])
        print(f"{call['name']}({call['args']}) -> {result}")
        messages.append(ToolMessage(str(result), tool_call_id=call["id"]))
    answer = model.bind_tools([multiply]).invoke(messages)
print(answer.content)
