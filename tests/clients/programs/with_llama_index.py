import sys

from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, URL, V1, argument, feature, pieces, weather
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool

(protocol,) = sys.argv[1:]
if protocol == "openai":
    from llama_index.llms.openai_like import OpenAILike

    about = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    model = OpenAILike(model=MODEL, api_base=V1, api_key=KEY, max_tokens=FEW, max_retries=0, **about)
else:
    from llama_index.llms.ollama import Ollama

    model = Ollama(model=MODEL, base_url=URL, request_timeout=120, additional_kwargs={"num_predict": FEW})


@feature
def chat():
    return model.chat([ChatMessage(QUESTION)]).message.content


@feature
def stream():
    return pieces(part.delta for part in model.stream_chat([ChatMessage(QUESTION)]))


@feature
def structured():
    return model.as_structured_llm(Capital).complete(QUESTION).raw


if protocol == "openai":

    @feature
    def completions():
        about = {"is_chat_model": False, "context_window": 8192}
        return OpenAILike(model=MODEL, api_base=V1, api_key=KEY, max_tokens=FEW, **about).complete("One, two,").text

    @feature
    def tools():
        tool = FunctionTool.from_defaults(weather)
        answer = model.chat_with_tools([tool], QUESTION, tool_required=True)
        return argument(model.get_tool_calls_from_response(answer)[0].tool_kwargs)
