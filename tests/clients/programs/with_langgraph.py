from features import FEW, KEY, MODEL, QUESTION, V1, called, feature, weather
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

model = ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, max_tokens=FEW, max_retries=0)
forced = model.bind_tools([weather], tool_choice="any")


def graph():
    built = StateGraph(MessagesState)
    built.add_node("ask", lambda state: {"messages": [forced.invoke(state["messages"])]})
    built.add_node("tools", ToolNode([weather]))
    built.add_node("tell", lambda state: {"messages": [model.invoke(state["messages"])]})
    for one, other in ((START, "ask"), ("ask", "tools"), ("tools", "tell")):
        built.add_edge(one, other)
    return built.compile()


@feature
def tools():
    last = graph().invoke({"messages": [("user", QUESTION)]})["messages"][-1]
    assert called
    return last


@feature
def stream():
    told = graph().stream({"messages": [("user", QUESTION)]}, stream_mode="messages")
    return sum(1 for _ in told) > 3
