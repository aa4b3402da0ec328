from capital import Capital
from crewai import LLM, Agent, Crew, Task
from features import FEW, KEY, MODEL, QUESTION, V1, feature

model = LLM(model=f"openai/{MODEL}", base_url=V1, api_key=KEY, max_tokens=FEW)


@feature
def chat():
    return model.call(QUESTION)


@feature
def structured():
    return LLM(model=f"openai/{MODEL}", base_url=V1, api_key=KEY, response_format=Capital).call(QUESTION)


@feature
def agent():
    one = Agent(role="Guide", goal="Answer briefly", backstory="You know cities.", llm=model, max_iter=1)
    task = Task(description=QUESTION, expected_output="A city", agent=one)
    return Crew(agents=[one], tasks=[task]).kickoff().raw
