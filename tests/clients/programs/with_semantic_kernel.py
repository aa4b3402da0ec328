from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, V1, apieces, called, feature, weather
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0))


def asked():
    history = ChatHistory()
    history.add_user_message(QUESTION)
    return history


@feature
async def chat():
    return str(await service.get_chat_message_content(asked(), OpenAIChatPromptExecutionSettings(max_tokens=FEW)))


@feature
async def stream():
    parts = service.get_streaming_chat_message_content(asked(), OpenAIChatPromptExecutionSettings(max_tokens=FEW))
    return await apieces(str(part) async for part in parts)


@feature
async def tools():
    kernel = Kernel()
    kernel.add_function("sky", kernel_function(name="weather", description="Tell the weather of a city.")(weather))
    settings = OpenAIChatPromptExecutionSettings(
        max_tokens=FEW, function_choice_behavior=FunctionChoiceBehavior.Required()
    )
    await service.get_chat_message_content(asked(), settings, kernel=kernel)
    return called[-1]


@feature
async def structured():
    settings = OpenAIChatPromptExecutionSettings(max_tokens=FEW, response_format=Capital)
    return Capital.model_validate_json(str(await service.get_chat_message_content(asked(), settings)))
