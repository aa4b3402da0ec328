import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import dspy
from features import FEW, KEY, MODEL, QUESTION, V1, City, feature

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=V1, api_key=KEY, max_tokens=FEW, cache=False, num_retries=0))


class Capital(dspy.Signature):
    """Name the capital."""

    question: str = dspy.InputField()
    city: City = dspy.OutputField()


@feature
def chat():
    return dspy.settings.lm(QUESTION)[0]


@feature
def structured():
    with dspy.context(adapter=dspy.JSONAdapter()):
        return dspy.Predict(Capital)(question=QUESTION).city
