import os
import tempfile

from features import FEW, KEY, MODEL, QUESTION, V1, feature, weather
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.tool import ToolDef

os.chdir(tempfile.mkdtemp())  # It writes logs.
model = get_model(f"openai-api/weft/{MODEL}", config=GenerateConfig(max_tokens=FEW), base_url=V1, api_key=KEY)


@feature
def chat():
    task = Task(dataset=[Sample(QUESTION, target="Berlin")], scorer=includes())
    (log,) = evaluate(task, model=model, display="none", log_format="json")
    assert log.status == "success", log.error
    return log.samples[0].output.completion


@feature
async def tools():
    tool = ToolDef(weather, name="weather", description="Tell it.", parameters={"city": "The city."}).as_tool()
    answer = await model.generate(QUESTION, tools=[tool], tool_choice="any")
    return answer.message.tool_calls[0].arguments["city"]
