import sys

from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, SCHEMA, URL, V1, apieces, argument, feature
from pydantic_ai import Agent, ModelRequest, ToolDefinition, ToolOutput
from pydantic_ai.direct import model_request
from pydantic_ai.models import ModelRequestParameters

(protocol,) = sys.argv[1:]
if protocol == "anthropic":
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
else:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=V1, api_key=KEY)
    model = OpenAIChatModel(MODEL, provider=provider)
few = {"max_tokens": FEW}


@feature
async def chat():
    return (await Agent(model, model_settings=few).run(QUESTION)).output


@feature
async def stream():
    async with Agent(model, model_settings=few).run_stream(QUESTION) as result:
        return await apieces(result.stream_text(delta=True, debounce_by=None))


@feature
async def structured():
    return (await Agent(model, output_type=ToolOutput(Capital), model_settings=few).run(QUESTION)).output


@feature
async def tools():
    tool = ToolDefinition(name="weather", description="Tell the weather of a city.", parameters_json_schema=SCHEMA)
    answer = await model_request(
        model, [ModelRequest.user_text_prompt(QUESTION)], model_settings=few | {"tool_choice": "required"},
        model_request_parameters=ModelRequestParameters(function_tools=[tool]),
    )  # fmt: skip
    return argument(answer.parts[0].args_as_dict())


if protocol == "openai":

    @feature
    async def responses():
        return (await Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=few).run(QUESTION)).output
