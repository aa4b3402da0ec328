/** The settings of a lane: model, system prompt, every sampling parameter, the answer's form, tools. */
import { useSignal } from "@preact/signals";
import { chatModels } from "./api";
import { type FormatKind, type Settings, updateSettings } from "./conversations";
import { modelOf } from "./generate";
import { type Json, parseJson, problemOf } from "./json";
import { EXAMPLES } from "./tools";

interface Param {
  name: string;
  label: string;
  about: string;
  kind: "number" | "integer" | "text" | "flag" | "lines" | "numbers" | "json" | "choice";
  min?: number;
  max?: number;
  step?: number;
  /** Where the slider stands while the parameter is not set. */
  rest?: number;
  choices?: string[];
}

const SAMPLING: Param[] = [
  { name: "temperature", label: "Temperature", about: "Higher: more varied. 0: always the likeliest token.", kind: "number", min: 0, max: 2, step: 0.05, rest: 1 },
  { name: "top_p", label: "Top p", about: "Keep the likeliest tokens that together have this probability.", kind: "number", min: 0.01, max: 1, step: 0.01, rest: 1 },
  { name: "top_k", label: "Top k", about: "Keep so many of the likeliest tokens; 0: all.", kind: "integer", min: -1 },
  { name: "min_p", label: "Min p", about: "Keep tokens at least this likely, as a share of the likeliest.", kind: "number", min: 0, max: 1, step: 0.01, rest: 0 },
  { name: "max_tokens", label: "Max tokens", about: "The longest answer; empty: up to the end of the context.", kind: "integer", min: 1 },
  { name: "seed", label: "Seed", about: "The same seed gives the same answer.", kind: "integer" },
  { name: "n", label: "Answers (n)", about: "So many answers at once, as branches.", kind: "integer", min: 1, max: 8 },
];
const PENALTIES: Param[] = [
  { name: "repetition_penalty", label: "Repetition penalty", about: "Above 1: tokens that came before are less likely.", kind: "number", min: 0.01, max: 2, step: 0.01, rest: 1 },
  { name: "presence_penalty", label: "Presence penalty", about: "Against every token that the answer has already.", kind: "number", min: -2, max: 2, step: 0.05, rest: 0 },
  { name: "frequency_penalty", label: "Frequency penalty", about: "The same, by how often it has it.", kind: "number", min: -2, max: 2, step: 0.05, rest: 0 },
  { name: "logit_bias", label: "Logit bias", about: 'JSON: token ids and what is added, as in {"504": -5}.', kind: "json" },
];
const STOPPING: Param[] = [
  { name: "stop", label: "Stop strings", about: "One a line: the answer ends before any of them.", kind: "lines" },
  { name: "stop_token_ids", label: "Stop token ids", about: "With commas between them.", kind: "numbers" },
  { name: "min_tokens", label: "Min tokens", about: "The answer does not end before.", kind: "integer", min: 0 },
  { name: "ignore_eos", label: "Go on behind the end of sequence", about: "", kind: "flag" },
  { name: "include_stop_str_in_output", label: "Show the stop string", about: "", kind: "flag" },
];
const MORE: Param[] = [
  { name: "reasoning_effort", label: "Reasoning effort", about: "For models that think.", kind: "choice", choices: ["none", "minimal", "low", "medium", "high", "xhigh", "max"] },
  { name: "enable_thinking", label: "Thinking", about: "For models whose template can switch it.", kind: "choice", choices: ["true", "false"] },
  { name: "speculative", label: "Speculative decoding", about: "Drafts change the speed and no token.", kind: "choice", choices: ["true", "false"] },
  { name: "adapter", label: "LoRA adapter", about: "Its name, where the model's name does not say.", kind: "text" },
  { name: "priority", label: "Priority", about: "Lower goes first.", kind: "integer" },
  { name: "cache_salt", label: "Cache salt", about: "Cached prompts are shared only with the same salt.", kind: "text" },
  { name: "truncate_prompt_tokens", label: "Truncate the prompt to", about: "Keep its last so many tokens; -1: what the context holds.", kind: "integer", min: -1 },
  { name: "skip_special_tokens", label: "Special tokens", about: "false: they are shown.", kind: "choice", choices: ["true", "false"] },
  { name: "parallel_tool_calls", label: "Parallel tool calls", about: "false: at most one call an answer.", kind: "choice", choices: ["true", "false"] },
  { name: "chat_template_kwargs", label: "Template variables", about: "JSON: variables for the chat template.", kind: "json" },
];

const FORMATS: { [kind in FormatKind]: { name: string; about: string; example: string } } = {
  text: { name: "Text", about: "", example: "" },
  json_object: { name: "JSON object", about: "Any JSON object.", example: "" },
  json_schema: {
    name: "JSON schema",
    about: "The answer always fits this schema.",
    example: JSON.stringify(
      {
        type: "object",
        properties: {
          name: { type: "string" },
          population: { type: "integer" },
          languages: { type: "array", items: { type: "string" } },
        },
        required: ["name", "population", "languages"],
        additionalProperties: false,
      },
      null,
      2,
    ),
  },
  regex: { name: "Regular expression", about: "The whole answer matches it.", example: "\\d{4}-\\d{2}-\\d{2}" },
  choice: { name: "One of these", about: "One a line; the answer is one of them.", example: "positive\nneutral\nnegative" },
  grammar: { name: "Grammar", about: "In Lark's notation, or in llama.cpp's.", example: 'start: GREETING ", " NAME "!"\nGREETING: "Hello" | "Good morning"\nNAME: /[A-Z][a-z]+/' },
};

function NumberRow({ param, value, set }: { param: Param; value: Json | undefined; set: (value: Json | undefined) => void }) {
  const id = `param-${param.name}`;
  const take = (text: string) => {
    const number = param.kind === "integer" ? Number.parseInt(text, 10) : Number.parseFloat(text);
    set(text.trim() === "" || Number.isNaN(number) ? undefined : number);
  };
  return (
    <div class="param">
      <label for={id} title={param.about}>
        {param.label}
      </label>
      <input
        id={id}
        class="num"
        type="number"
        inputMode="decimal"
        min={param.min}
        max={param.max}
        step={param.step ?? 1}
        placeholder="auto"
        aria-describedby={`${id}-about`}
        value={typeof value === "number" ? value : ""}
        onChange={(event) => take(event.currentTarget.value)}
      />
      {param.rest !== undefined && (
        <input
          type="range"
          class={value === undefined ? "unset" : ""}
          aria-label={`${param.label}, slider`}
          min={param.min}
          max={param.max}
          step={param.step}
          value={typeof value === "number" ? value : param.rest}
          onInput={(event) => take(event.currentTarget.value)}
        />
      )}
      <span id={`${id}-about`} class="about">
        {param.about}
      </span>
    </div>
  );
}

function ParamRow({ param, settings, lane }: { param: Param; settings: Settings; lane: number }) {
  const value = settings.params[param.name];
  const draft = useSignal<string | null>(null);
  const set = (next: Json | undefined) => {
    const params = { ...settings.params };
    if (next === undefined) delete params[param.name];
    else params[param.name] = next;
    updateSettings(lane, { params });
  };
  if (param.kind === "number" || param.kind === "integer") return <NumberRow param={param} value={value} set={set} />;
  if (param.kind === "flag")
    return (
      <label class="check">
        <input type="checkbox" checked={value === true} onChange={(event) => set(event.currentTarget.checked || undefined)} />
        <span>{param.label}</span>
      </label>
    );
  if (param.kind === "choice")
    return (
      <div class="field">
        <label class="field">
        <span>{param.label}</span>
        <select
          value={value === undefined ? "" : String(value)}
          onChange={(event) => {
            const chosen = event.currentTarget.value;
            set(chosen === "" ? undefined : chosen === "true" ? true : chosen === "false" ? false : chosen);
          }}
        >
          <option value="">auto</option>
          {param.choices?.map((choice) => <option key={choice}>{choice}</option>)}
        </select>
        </label>
        <small class="about">{param.about}</small>
      </div>
    );
  if (param.kind === "text")
    return (
      <div class="field">
        <label class="field">
        <span>{param.label}</span>
        <input value={typeof value === "string" ? value : ""} onChange={(event) => set(event.currentTarget.value || undefined)} />
        </label>
        <small class="about">{param.about}</small>
      </div>
    );
  const written = Array.isArray(value)
    ? value.join(param.kind === "lines" ? "\n" : ", ")
    : value === undefined
      ? ""
      : JSON.stringify(value);
  const problem = param.kind === "json" && draft.value !== null ? problemOf(draft.value) : "";
  return (
    <div class="field">
      <label class="field">
      <span>{param.label}</span>
      <textarea
        class="mono"
        rows={param.kind === "lines" ? 2 : 1}
        spellcheck={false}
        aria-invalid={problem !== ""}
        value={draft.value ?? written}
        onInput={(event) => {
          const text = event.currentTarget.value;
          draft.value = text;
          if (param.kind === "lines") set(text.split("\n").filter(Boolean).length ? text.split("\n").filter(Boolean) : undefined);
          else if (param.kind === "numbers") {
            const ids = text.split(/[\s,]+/).filter(Boolean).map(Number).filter(Number.isInteger);
            set(ids.length ? ids : undefined);
          } else if (!problemOf(text)) set(parseJson(text));
        }}
      />
      </label>
      <small class={problem ? "error" : "about"}>{problem || param.about}</small>
    </div>
  );
}

function Group(props: { title: string; params: Param[]; settings: Settings; lane: number; isOpen?: boolean }) {
  const count = props.params.filter((param) => props.settings.params[param.name] !== undefined).length;
  return (
    <details open={props.isOpen}>
      <summary>
        {props.title}
        {count > 0 && <span class="count">{count}</span>}
      </summary>
      <div class="group">
        {props.params.map((param) => (
          <ParamRow key={`${props.lane}-${param.name}`} param={param} settings={props.settings} lane={props.lane} />
        ))}
      </div>
    </details>
  );
}

export function ModelSelect({ settings, lane, label }: { settings: Settings; lane: number; label: string }) {
  return (
    <select
      class="model-select"
      aria-label={label}
      value={modelOf(settings)}
      onChange={(event) => updateSettings(lane, { model: event.currentTarget.value })}
    >
      {chatModels().map((card) => (
        <option key={card.id} value={card.id}>
          {card.id}
          {card.state && card.state !== "loaded" ? ` (${card.state})` : ""}
        </option>
      ))}
    </select>
  );
}

function Format({ settings, lane }: { settings: Settings; lane: number }) {
  const kind = settings.format;
  const text = settings.formats[kind] ?? "";
  const isJson = kind === "json_schema";
  const problem = isJson ? problemOf(text) : "";
  const set = (next: string) => updateSettings(lane, { formats: { ...settings.formats, [kind]: next } });
  return (
    <details open={kind !== "text"}>
      <summary>
        Structured output
        {kind !== "text" && <span class="count">{FORMATS[kind].name}</span>}
      </summary>
      <div class="group">
        <label class="field">
          <span>The answer is</span>
          <select
            value={kind}
            onChange={(event) => {
              const format = event.currentTarget.value as FormatKind;
              const formats = { ...settings.formats, [format]: settings.formats[format] || FORMATS[format].example };
              updateSettings(lane, { format, formats });
            }}
          >
            {Object.entries(FORMATS).map(([value, { name }]) => (
              <option key={value} value={value}>
                {name}
              </option>
            ))}
          </select>
        </label>
        {FORMATS[kind].example && (
          <>
            <div class="field">
              <label class="field">
              <span>{FORMATS[kind].name}</span>
              <textarea
                class="mono"
                rows={kind === "regex" ? 2 : 10}
                spellcheck={false}
                aria-invalid={problem !== ""}
                value={text}
                onInput={(event) => set(event.currentTarget.value)}
              />
              </label>
              <small class={problem ? "error" : "about"} role={problem ? "alert" : undefined}>
                {problem || FORMATS[kind].about}
              </small>
            </div>
            <div class="row">
              {isJson && (
                <button type="button" disabled={problem !== ""} onClick={() => set(JSON.stringify(parseJson(text) ?? {}, null, 2))}>
                  Format
                </button>
              )}
              <button type="button" onClick={() => set(FORMATS[kind].example)}>
                Example
              </button>
            </div>
          </>
        )}
      </div>
    </details>
  );
}

export function toolNames(text: string): string[] {
  try {
    const tools = parseJson(text);
    if (!Array.isArray(tools)) return [];
    return tools
      .map((tool) => (tool && typeof tool === "object" && !Array.isArray(tool) ? tool.function : null))
      .map((held) => (held && typeof held === "object" && !Array.isArray(held) ? held.name : null))
      .filter((name) => typeof name === "string");
  } catch {
    return [];
  }
}

function Tools({ settings, lane }: { settings: Settings; lane: number }) {
  const problem = problemOf(settings.tools);
  const names = toolNames(settings.tools);
  return (
    <details open={names.length > 0}>
      <summary>
        Tools
        {names.length > 0 && <span class="count">{names.length}</span>}
      </summary>
      <div class="group">
        <div class="field">
          <label class="field">
          <span>Tools, as JSON</span>
          <textarea
            class="mono"
            rows={names.length ? 9 : 3}
            spellcheck={false}
            placeholder='[{"type": "function", "function": {…}}]'
            aria-invalid={problem !== ""}
            value={settings.tools}
            onInput={(event) => updateSettings(lane, { tools: event.currentTarget.value })}
          />
          </label>
          <small class={problem ? "error" : "about"}>
            {problem || "This page runs the example's clock and calculator itself; results of others are yours to give."}
          </small>
        </div>
        <div class="row">
          <button type="button" onClick={() => updateSettings(lane, { tools: JSON.stringify(EXAMPLES, null, 2) })}>
            Example
          </button>
          {settings.tools && (
            <button type="button" onClick={() => updateSettings(lane, { tools: "", toolChoice: "auto" })}>
              No tools
            </button>
          )}
        </div>
        {names.length > 0 && (
          <label class="field">
            <span>Tool choice</span>
            <select value={settings.toolChoice} onChange={(event) => updateSettings(lane, { toolChoice: event.currentTarget.value })}>
              <option value="auto">auto: the model decides</option>
              <option value="required">required: any of them</option>
              <option value="none">none</option>
              {names.map((name) => (
                <option key={name} value={name}>
                  {name}
                </option>
              ))}
            </select>
          </label>
        )}
      </div>
    </details>
  );
}

export function SettingsPanel({ settings, lane }: { settings: Settings; lane: number }) {
  const problem = problemOf(settings.extra);
  return (
    <div class="settings" key={lane}>
      <label class="field">
        <span>Model</span>
        <ModelSelect settings={settings} lane={lane} label="Model" />
      </label>
      <label class="field">
        <span>System prompt</span>
        <textarea
          rows={3}
          placeholder="You are a helpful assistant."
          value={settings.system}
          onInput={(event) => updateSettings(lane, { system: event.currentTarget.value })}
        />
      </label>
      <Group title="Sampling" params={SAMPLING} settings={settings} lane={lane} isOpen />
      <Format settings={settings} lane={lane} />
      <Tools settings={settings} lane={lane} />
      <details open={settings.hasTokens}>
        <summary>
          Token view
          {settings.hasTokens && <span class="count">on</span>}
        </summary>
        <div class="group">
          <label class="check">
            <input
              type="checkbox"
              checked={settings.hasTokens}
              onChange={(event) => updateSettings(lane, { hasTokens: event.currentTarget.checked })}
            />
            <span>Ask for token probabilities</span>
          </label>
          <ParamRow
            param={{ name: "top_logprobs", label: "Alternatives", about: "Shown for every token; 5 unless set, at most 20.", kind: "integer", min: 0, max: 20 }}
            settings={settings}
            lane={lane}
          />
        </div>
      </details>
      <Group title="Penalties" params={PENALTIES} settings={settings} lane={lane} />
      <Group title="Stopping" params={STOPPING} settings={settings} lane={lane} />
      <Group title="More" params={MORE} settings={settings} lane={lane} />
      <details>
        <summary>
          Other fields
          {settings.extra.trim() && <span class="count">on</span>}
        </summary>
        <div class="group">
          <div class="field">
            <label class="field">
            <span>JSON that is added to the request</span>
            <textarea
              class="mono"
              rows={4}
              spellcheck={false}
              placeholder='{"structured_outputs": {"regex": "…"}}'
              aria-invalid={problem !== ""}
              value={settings.extra}
              onInput={(event) => updateSettings(lane, { extra: event.currentTarget.value })}
            />
            </label>
            <small class={problem ? "error" : "about"}>{problem || "Any field of the API reference."}</small>
          </div>
        </div>
      </details>
      <button
        type="button"
        class="link"
        onClick={() =>
          updateSettings(lane, { system: "", params: {}, format: "text", tools: "", toolChoice: "auto", hasTokens: false, extra: "" })
        }
      >
        Reset all settings
      </button>
    </div>
  );
}
