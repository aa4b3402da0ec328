from capital import Capital
from features import FEW, KEY, MODEL, QUESTION, V1, feature, pieces, weather
from magentic import FunctionCall, OpenaiChatModel, StreamedStr, prompt

model = OpenaiChatModel(MODEL, base_url=V1, api_key=KEY, max_tokens=FEW)


@prompt(QUESTION, model=model)
def told() -> str: ...


@prompt(QUESTION, model=model)
def streamed() -> StreamedStr: ...


@prompt(QUESTION, functions=[weather], model=model)
def call() -> FunctionCall[str]: ...


@prompt(QUESTION, model=model)
def capital() -> Capital: ...


@feature
def chat():
    return told()


@feature
def stream():
    return pieces(streamed())


@feature
def tools():
    return call()()


@feature
def structured():
    return capital()
