from autogen_core import CancellationToken
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, V1, apieces, argument, feature, weather

about = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}
client = OpenAIChatCompletionClient(model=MODEL, base_url=V1, api_key=KEY, model_info=about, max_tokens=FEW)
asked = [UserMessage(content=QUESTION, source="user")]


@feature
async def chat():
    return (await client.create(asked)).content


@feature
async def stream():
    return await apieces(part async for part in client.create_stream(asked) if isinstance(part, str))


@feature
async def tools():
    tool = FunctionTool(weather, "Tell the weather of a city.")
    answer = await client.create(asked, tools=[tool], tool_choice="required", cancellation_token=CancellationToken())
    return argument(answer.content[0].arguments)


@feature
async def structured():
    return Capital.model_validate_json((await client.create(asked, json_output=Capital)).content)
