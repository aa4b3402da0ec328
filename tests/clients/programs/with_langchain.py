import sys

from capital import Capital
from features import ASK, FEW, KEY, MODEL, QUESTION, URL, V1, argument, feature, pieces, weather

(protocol,) = sys.argv[1:]
if protocol == "openai":
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    model = ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, max_tokens=FEW, max_retries=0)
elif protocol == "anthropic":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=FEW, max_retries=0)
else:
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    model = ChatOllama(model=MODEL, base_url=URL, num_predict=FEW)


@feature
def chat():
    return model.invoke(QUESTION).content


@feature
def stream():
    return pieces(chunk.text if isinstance(chunk.text, str) else chunk.text() for chunk in model.stream(QUESTION))


@feature
def tools():
    if protocol == "ollama":  # Its protocol has no tool_choice.
        return model.bind_tools([weather]).invoke(ASK)
    return argument(model.bind_tools([weather], tool_choice="any").invoke(ASK).tool_calls[0]["args"])


@feature
def structured():
    return model.with_structured_output(Capital, method="json_schema").invoke(QUESTION)


if protocol == "openai":

    @feature
    def responses():
        over = ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, max_tokens=FEW, use_responses_api=True)
        return over.invoke(QUESTION).content

    @feature
    def logprobs():
        return len(model.bind(logprobs=True).invoke(QUESTION).response_metadata["logprobs"]["content"])

    @feature
    def embeddings():
        made = OpenAIEmbeddings(model=MODEL, base_url=V1, api_key=KEY, check_embedding_ctx_length=False)
        return len(made.embed_query("The sea is calm."))


if protocol == "ollama":

    @feature
    def embeddings():
        return len(OllamaEmbeddings(model=MODEL, base_url=URL).embed_query("The sea is calm."))
