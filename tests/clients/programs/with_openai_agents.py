from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as without_tracing
from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, V1, called, feature, pieces, weather
from openai import AsyncOpenAI

without_tracing(True)
client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
over_chat = OpenAIChatCompletionsModel(MODEL, client)
few = ModelSettings(max_tokens=FEW)
once = {"tools": [function_tool(weather)], "tool_use_behavior": "stop_on_first_tool"}


def agent(model=over_chat, settings=few, **more):
    return Agent(name="One", instructions="Be brief.", model=model, model_settings=settings, **more)


@feature
async def chat():
    return (await Runner.run(agent(), QUESTION)).final_output


@feature
async def stream():
    events = [event async for event in Runner.run_streamed(agent(), QUESTION).stream_events()]
    data = [event.data for event in events if event.type == "raw_response_event"]
    return pieces(one.delta for one in data if one.type == "response.output_text.delta")


@feature
async def tools():
    forced = ModelSettings(max_tokens=FEW, tool_choice="required", parallel_tool_calls=False)
    await Runner.run(agent(settings=forced, **once), QUESTION)
    return called[-1]


@feature
async def structured():
    return (await Runner.run(agent(output_type=Capital), QUESTION)).final_output


@feature
async def responses():
    over = OpenAIResponsesModel(MODEL, client)
    forced = ModelSettings(max_tokens=FEW, tool_choice="required", parallel_tool_calls=False)
    called.clear()
    await Runner.run(agent(over, forced, **once), QUESTION)
    return called[-1]
