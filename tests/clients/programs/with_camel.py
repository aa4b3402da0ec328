from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, V1, called, feature, weather


def model(**settings):
    return ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL, model_type=MODEL, url=V1, api_key=KEY,
        model_config_dict={"max_tokens": FEW, **settings},
    )  # fmt: skip


@feature
def chat():
    return ChatAgent("Be brief.", model=model()).step(QUESTION).msgs[0].content


@feature
def tools():
    agent = ChatAgent("Be brief.", model=model(tool_choice="required"), tools=[FunctionTool(weather)], max_iteration=1)
    agent.step(QUESTION)
    return called[-1]


@feature
def structured():
    return ChatAgent("Be brief.", model=model()).step(QUESTION, response_format=Capital).msgs[0].parsed
