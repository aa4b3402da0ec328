/** Answers: the request of a lane, its stream, and the tools that the page runs itself. */
import { signal } from "@preact/signals";
import { ApiError, chatModels, modelsAsked, post } from "./api";
import {
  add,
  conversation,
  type Conversation,
  leave,
  type Message,
  order,
  pathTo,
  type Settings,
  type Stats,
  type Token,
  type ToolCall,
  updateMessage,
} from "./conversations";
import { type Json, parseJson } from "./json";
import { spoken } from "./shell";
import { runTool } from "./tools";

type Body = { [field: string]: Json };

/** The messages that are being written, and what stops them. */
const running = new Map<string, AbortController>();
export const runningIds = signal<ReadonlySet<string>>(new Set());

function setRunning(id: string, controller: AbortController | null): void {
  if (controller) running.set(id, controller);
  else running.delete(id);
  runningIds.value = new Set(running.keys());
}

addEventListener("pagehide", () => {
  for (const id of order.peek()) {
    const item = conversation(id)?.peek();
    if (item && isWriting(item)) leave(id);
  }
});

/** Stops the answers of a conversation; of all conversations without one. */
export function stop(item?: Conversation): void {
  for (const [id, controller] of running) if (!item || item.messages[id]) controller.abort();
}

export function isWriting(item: Conversation): boolean {
  return [...runningIds.value].some((id) => item.messages[id]);
}

export function modelOf(settings: Settings): string {
  return chatModels().some((card) => card.id === settings.model) ? settings.model : (chatModels()[0]?.id ?? settings.model);
}

/** What a lane asks for, besides the messages. Throws with the reason where a field of the settings is no JSON. */
export function requestOf(settings: Settings): Body {
  const body: Body = { model: modelOf(settings), ...settings.params };
  if (settings.hasTokens) Object.assign(body, { logprobs: true, top_logprobs: settings.params.top_logprobs ?? 5 });
  else delete body.top_logprobs;
  const format = settings.formats[settings.format] ?? "";
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = named("The schema", () => parseJson(format)) ?? {};
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.format === "regex" && format) body.structured_outputs = { regex: format };
  if (settings.format === "grammar" && format) body.structured_outputs = { grammar: format };
  if (settings.format === "choice") {
    const choice = format.split("\n").map((line) => line.trim()).filter(Boolean);
    if (choice.length) body.structured_outputs = { choice };
  }
  const tools = named("The list of tools", () => parseJson(settings.tools));
  if (Array.isArray(tools) && tools.length) {
    body.tools = tools;
    body.tool_choice = ["auto", "none", "required"].includes(settings.toolChoice)
      ? settings.toolChoice
      : { type: "function", function: { name: settings.toolChoice } };
  }
  const extra = named("Other fields", () => parseJson(settings.extra));
  return extra && typeof extra === "object" && !Array.isArray(extra) ? { ...body, ...extra } : body;
}

function named<T>(what: string, parse: () => T): T {
  try {
    return parse();
  } catch (error) {
    throw new Error(`${what}: ${error instanceof Error ? error.message : error}`);
  }
}

export function messagesOf(system: string, path: Message[]): Json[] {
  const written: Json[] = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of path) {
    if (message.role === "tool") written.push({ role: "tool", tool_call_id: message.callId ?? "", content: message.content });
    else if (message.calls?.length)
      written.push({
        role: "assistant",
        content: message.content,
        tool_calls: message.calls.map((call) => ({
          id: call.id,
          type: "function",
          function: { name: call.name, arguments: call.arguments },
        })),
      });
    // An answer that failed before its first token says nothing.
    else if (message.content || message.role === "user") written.push({ role: message.role, content: message.content });
  }
  return written;
}

interface Delta {
  content?: string;
  reasoning_content?: string;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}
interface Chunk {
  choices?: {
    index: number;
    delta: Delta;
    logprobs?: { content?: { token: string; logprob: number; top_logprobs: { token: string; logprob: number }[] }[] } | null;
    finish_reason: string | null;
    timings?: { queue_ms: number | null; ttft_ms: number; inter_token_ms: number; total_ms: number };
  }[];
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } } | null;
  error?: { message: string };
}

const FLUSH_MS = 40;
const MAX_TOOL_ROUNDS = 8;

/** What an answer has so far. */
class Draft {
  content = "";
  reasoning = "";
  readonly calls: ToolCall[] = [];
  readonly tokens: Token[] = [];
  stats: Stats = {};
  finish = "";

  take(choice: NonNullable<Chunk["choices"]>[number]): void {
    this.content += choice.delta.content ?? "";
    this.reasoning += choice.delta.reasoning_content ?? "";
    for (const part of choice.delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
      call.id ||= part.id ?? "";
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    for (const token of choice.logprobs?.content ?? [])
      this.tokens.push({
        text: token.token,
        logprob: token.logprob,
        top: token.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
      });
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const times = choice.timings;
    if (times)
      this.stats = {
        ...this.stats,
        ttftMs: times.ttft_ms,
        interTokenMs: times.inter_token_ms,
        totalMs: times.total_ms,
        queueMs: times.queue_ms ?? undefined,
      };
  }

  fields(): Partial<Message> {
    return {
      content: this.content,
      reasoning: this.reasoning || undefined,
      calls: this.calls.length ? this.calls.filter(Boolean).map((call) => ({ ...call })) : undefined,
      tokens: this.tokens.length ? [...this.tokens] : undefined,
      stats: { ...this.stats },
      finish: this.finish || undefined,
    };
  }
}

/** Writes an answer behind a lane's head; with tools, as many as it takes. */
export async function answer(id: string, lane: number, parent: string, round = 0): Promise<void> {
  // Who is quicker than the server's list of models is answered by the first of it, too.
  if (!chatModels().length) await modelsAsked();
  const item = conversation(id)?.peek();
  const settings = item?.lanes[lane]?.settings;
  if (!item || !settings) return;
  let request: Body;
  try {
    request = requestOf(settings);
  } catch (error) {
    add(id, lane, { parent, role: "assistant", content: "", error: error instanceof Error ? error.message : String(error) });
    return;
  }
  // A call that is forced would be made again and again.
  if (round > 0 && request.tool_choice !== undefined && request.tool_choice !== "none") request.tool_choice = "auto";
  const path = pathTo(item, parent);
  const count = typeof request.n === "number" ? Math.max(1, request.n) : 1;
  const common = { parent, role: "assistant" as const, content: "", model: String(request.model), request, isPending: true };
  const made = Array.from({ length: count }, () => add(id, lane, common));
  const first = made[0];
  if (!first) return;
  const drafts = made.map(() => new Draft());
  const controller = new AbortController();
  setRunning(first.id, controller);
  spoken.value = "The answer begins.";
  let timer = 0;
  let said = 0;
  const flush = () => {
    timer = 0;
    drafts.forEach((draft, at) => made[at] && updateMessage(id, made[at].id, draft.fields()));
    said = speak(drafts[0]?.content ?? "", said);
  };
  let trouble = "";
  try {
    const body = {
      ...request,
      messages: messagesOf(settings.system, path),
      stream: true,
      stream_options: { include_usage: true },
      return_timings: true,
    };
    for await (const { data } of post("v1/chat/completions", body, controller.signal)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data) as Chunk;
      if (chunk.error) throw new ApiError(chunk.error.message, 0);
      for (const choice of chunk.choices ?? []) drafts[choice.index]?.take(choice);
      const usage = chunk.usage;
      if (usage)
        for (const [at, draft] of drafts.entries())
          draft.stats = {
            ...draft.stats,
            promptTokens: usage.prompt_tokens,
            completionTokens: count > 1 ? (at === 0 ? usage.completion_tokens : undefined) : usage.completion_tokens,
            cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
          };
      timer ||= setTimeout(flush, FLUSH_MS);
    }
    if (!drafts.some((draft) => draft.finish)) trouble = "The answer broke off: the server closed the connection.";
  } catch (error) {
    if (controller.signal.aborted) for (const draft of drafts) draft.finish ||= "stopped";
    else if (error instanceof ApiError) trouble = [error.message, error.hint].filter(Boolean).join(" ");
    // Browsers call it a TypeError, each with words of its own, when a connection is lost.
    else if (error instanceof TypeError) trouble = "The answer broke off: the connection to the server was lost.";
    else trouble = `The answer broke off: ${error instanceof Error ? error.message : error}`;
  }
  clearTimeout(timer);
  setRunning(first.id, null);
  drafts.forEach(
    (draft, at) =>
      made[at] && updateMessage(id, made[at].id, { ...draft.fields(), isPending: undefined, error: trouble || undefined }),
  );
  spoken.value = trouble || "The answer has ended.";
  const last = drafts[count - 1];
  const end = made[count - 1];
  if (last && end && last.calls.length && ["tool_calls", "stop"].includes(last.finish) && !trouble && round < MAX_TOOL_ROUNDS) {
    await runCalls(id, lane, end.id, last.calls, round);
  }
}

/** Runs the calls that the page has tools for; the answer goes on when all have their results. */
async function runCalls(id: string, lane: number, messageId: string, calls: ToolCall[], round: number): Promise<void> {
  let parent = messageId;
  let isWhole = true;
  for (const call of calls) {
    const result = runTool(call);
    if (result === null) isWhole = false;
    else parent = add(id, lane, { parent, role: "tool", content: result, callId: call.id }).id;
  }
  if (isWhole) await answer(id, lane, parent, round + 1);
}

/** Takes a tool's result that the user wrote; the answer goes on when it was the last one that was missing. */
export async function giveResult(id: string, lane: number, caller: Message, call: ToolCall, result: string): Promise<void> {
  const head = conversation(id)?.peek().lanes[lane]?.head ?? caller.id;
  add(id, lane, { parent: head, role: "tool", content: result, callId: call.id });
  const item = conversation(id)?.peek();
  const lastId = item?.lanes[lane]?.head ?? null;
  if (!item || lastId === null) return;
  const results = new Set(pathTo(item, lastId).map((message) => message.callId));
  if (caller.calls?.every((other) => results.has(other.id))) await answer(id, lane, lastId, 1);
}

/** Says whole sentences of what came since the last time; returns how much has been said. */
function speak(content: string, said: number): number {
  const fresh = content.slice(said);
  const end = Math.max(fresh.lastIndexOf(". "), fresh.lastIndexOf("\n"), fresh.lastIndexOf("? "), fresh.lastIndexOf("! "));
  if (end < 60) return said;
  spoken.value = fresh.slice(0, end + 1);
  return said + end + 1;
}
