/** A request as a command or a program, to be copied. The key is not in it: it stands in the environment. */
import { signal, useSignal } from "@preact/signals";
import { apiKey, urlOf } from "./api";
import { CodeBlock } from "./code";
import { type Json, toPython } from "./json";
import { Dialog } from "./shell";

type Body = { [field: string]: Json };

/** The request that the dialog shows; null: it is closed. */
export const shownRequest = signal<{ path: string; body: Body } | null>(null);

export function curl(path: string, body: Body): string {
  const key = apiKey.value ? ` \\\n  -H "Authorization: Bearer $WEFT_API_KEY"` : "";
  return `curl ${urlOf(path)}${key} --json '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`;
}

const OPENAI_CHAT = new Set(
  (
    "model messages stream stream_options temperature top_p n seed stop presence_penalty frequency_penalty logit_bias " +
    "max_tokens max_completion_tokens logprobs top_logprobs response_format tools tool_choice parallel_tool_calls reasoning_effort"
  ).split(" "),
);

export function python(path: string, body: Body): string {
  const key = apiKey.value ? `os.environ["WEFT_API_KEY"]` : `"none"`;
  const imports = apiKey.value ? "import os\n\n" : "";
  if (path !== "v1/chat/completions")
    return `${imports}import httpx

answer = httpx.post(
    ${JSON.stringify(urlOf(path))},
    headers={"Authorization": f"Bearer {${key.replaceAll('"', "'")}}"},
    json=${toPython(body, "    ")},
    timeout=None,
)
answer.raise_for_status()
print(answer.json())
`;
  const known = Object.entries({ ...body, stream: true }).filter(([name]) => OPENAI_CHAT.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI_CHAT.has(name)));
  const fields = known.map(([name, value]) => `    ${name}=${toPython(value, "    ")},\n`).join("");
  const rest = Object.keys(extra).length ? `    extra_body=${toPython(extra, "    ")},\n` : "";
  return `${imports}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(urlOf("v1"))}, api_key=${key})
stream = client.chat.completions.create(
${fields}${rest})
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
`;
}

export function RequestDialog() {
  const form = useSignal<"curl" | "Python" | "JSON">("curl");
  const held = shownRequest.value;
  const text = !held
    ? ""
    : form.value === "curl"
      ? curl(held.path, held.body)
      : form.value === "Python"
        ? python(held.path, held.body)
        : JSON.stringify(held.body, null, 2);
  return (
    <Dialog isOpen={held !== null} title="This request as code" class="wide" onClose={() => (shownRequest.value = null)}>
      <div class="segments" role="radiogroup" aria-label="Form">
        {(["curl", "Python", "JSON"] as const).map((name) => (
          <label key={name}>
            <input type="radio" name="form" checked={form.value === name} onChange={() => (form.value = name)} />
            <span>{name}</span>
          </label>
        ))}
      </div>
      <CodeBlock code={text} language={{ curl: "sh", Python: "python", JSON: "json" }[form.value]} />
    </Dialog>
  );
}
