import dspy
from features import FEW, KEY, MODEL, QUESTION, SCHEMA, V1, argument, feature

model = dspy.LM(f"openai/{MODEL}", api_base=V1, api_key=KEY, max_tokens=FEW, cache=False, num_retries=0)


@feature
def chat():
    return model(QUESTION)[0]


@feature
def structured():
    shape = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}}
    return argument(model(QUESTION, response_format=shape)[0])
