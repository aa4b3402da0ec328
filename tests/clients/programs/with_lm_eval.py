import json
import tempfile
from pathlib import Path

from features import MODEL, V1, feature
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

folder = Path(tempfile.mkdtemp())
(folder / "capitals.json").write_text(
    "\n".join(json.dumps({"q": f"The capital of {one} is", "a": two}) for one, two in
              (("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome")))
)  # fmt: skip
task = {
    "task": "capitals", "dataset_path": "json", "test_split": "test", "doc_to_text": "{{q}}",
    "dataset_kwargs": {"data_files": {"test": str(folder / "capitals.json")}}, "doc_to_target": " {{a}}",
}  # fmt: skip


tasks = TaskManager(include_defaults=False)


def evaluated(model, **more):
    args = {"model": MODEL, "max_retries": 1, "num_concurrent": 1}
    if model == "local-completions":
        args |= {"base_url": f"{V1}/completions", "tokenizer_backend": "remote"}
    else:
        args |= {"base_url": f"{V1}/chat/completions"}
    made = simple_evaluate(model, args, tasks=[task | more], task_manager=tasks, bootstrap_iters=0,
                           apply_chat_template=model == "local-chat-completions")  # fmt: skip
    return made["results"]["capitals"]


@feature
def logprobs():
    """The log probabilities of a whole prompt, as `echo` tells them."""
    return evaluated("local-completions", output_type="loglikelihood", metric_list=[{"metric": "perplexity"}])


generated = {
    "output_type": "generate_until", "generation_kwargs": {"until": ["."], "max_gen_toks": 16},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


@feature
def completions():
    return evaluated("local-completions", **generated)


@feature
def chat():
    return evaluated("local-chat-completions", **generated)
