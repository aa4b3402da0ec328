from capital import Capital
from crewai import LLM, Agent, Crew, Task
from features import FEW, KEY, MODEL, QUESTION, V1, feature

place = {"model": f"openai/{MODEL}", "base_url": V1, "api_key": KEY, "max_tokens": FEW}


@feature
def chat():
    agent = Agent(role="Guide", goal="Answer briefly", backstory="You know cities.", llm=LLM(**place), max_iter=1)
    task = Task(description=QUESTION, expected_output="A city", agent=agent)
    return Crew(agents=[agent], tasks=[task]).kickoff().raw


@feature
def structured():
    return LLM(**place, response_format=Capital).call(QUESTION)
