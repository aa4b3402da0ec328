/** Conversations: trees of messages, kept in the browser. A lane is one path through the tree with settings of its own;
 * there are two of them side by side. */
import { signal, type Signal } from "@preact/signals";
import * as db from "./db";
import type { Json } from "./json";

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/** A token of an answer: its text, its log probability, and the likeliest tokens in its place. */
export interface Token {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

export interface Stats {
  ttftMs?: number;
  interTokenMs?: number;
  totalMs?: number;
  queueMs?: number;
  promptTokens?: number;
  completionTokens?: number;
  cachedTokens?: number;
}

export type Role = "user" | "assistant" | "tool";

export interface Message {
  id: string;
  parent: string | null;
  role: Role;
  content: string;
  created: number;
  reasoning?: string;
  calls?: ToolCall[];
  /** Of a tool's result: the call that it answers. */
  callId?: string;
  tokens?: Token[];
  stats?: Stats;
  finish?: string;
  error?: string;
  model?: string;
  /** What was asked for besides the messages. */
  request?: { [field: string]: Json };
  isPending?: boolean;
}

export type FormatKind = "text" | "json_object" | "json_schema" | "regex" | "choice" | "grammar";

export interface Settings {
  model: string;
  system: string;
  params: { [name: string]: Json };
  format: FormatKind;
  /** What the format must be: a schema, an expression, the choices by line, a grammar; by its kind. */
  formats: { [kind: string]: string };
  tools: string;
  toolChoice: string;
  hasTokens: boolean;
  extra: string;
}

export interface Lane {
  head: string | null;
  settings: Settings;
}

export interface Conversation {
  id: string;
  title: string;
  created: number;
  updated: number;
  messages: { [id: string]: Message };
  lanes: Lane[];
}

const DEFAULTS = "weft.settings";

export const EMPTY_SETTINGS: Settings = {
  model: "",
  system: "",
  params: {},
  format: "text",
  formats: {},
  tools: "",
  toolChoice: "auto",
  hasTokens: false,
  extra: "",
};

export function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(10)), (byte) => byte.toString(36).padStart(2, "0")).join("");
}

function defaultSettings(): Settings {
  try {
    return readSettings(JSON.parse(localStorage.getItem(DEFAULTS) ?? "{}"));
  } catch {
    return EMPTY_SETTINGS;
  }
}

const known = new Map<string, Signal<Conversation>>();
/** The conversations' ids, the newest first. */
export const order = signal<string[]>([]);
export const currentId = signal("");
export const isLoaded = signal(false);

export function conversation(id: string): Signal<Conversation> | undefined {
  return known.get(id);
}

export function current(): Signal<Conversation> {
  const found = known.get(currentId.value);
  if (found) return found;
  return begin();
}

/** Begins a conversation; it is kept from its first message on. */
export function begin(): Signal<Conversation> {
  const empty = [...known.values()].find((item) => isEmpty(item.peek()));
  const now = Date.now();
  const made =
    empty ??
    signal<Conversation>({
      id: newId(),
      title: "",
      created: now,
      updated: now,
      messages: {},
      lanes: [{ head: null, settings: defaultSettings() }],
    });
  known.set(made.peek().id, made);
  currentId.value = made.peek().id;
  return made;
}

export const isEmpty = (item: Conversation) => Object.keys(item.messages).length === 0;

const saving = new Map<string, number>();

function save(id: string): void {
  if (saving.has(id)) return;
  saving.set(
    id,
    setTimeout(() => {
      saving.delete(id);
      const item = known.get(id)?.peek();
      if (item && !isEmpty(item)) keep(item).catch(onFull);
    }, 300),
  );
}

async function keep(item: Conversation): Promise<void> {
  await db.put("conversations", item);
  tabs.postMessage({ kind: "kept", id: item.id } satisfies TabEvent);
}

/** What the page's tabs in one browser tell each other. left: the tab that wrote an answer is gone. */
type TabEvent = { kind: "kept" | "forgotten" | "left"; id: string };
const tabs = new BroadcastChannel("weft");
tabs.addEventListener("message", ({ data }: MessageEvent<TabEvent>) => {
  if (data.kind === "forgotten") drop(data.id);
  else if (data.kind === "left") settle(data.id);
  else void db.get("conversations", data.id).then(join, onFull);
});

/** Tells the other tabs that answers of a conversation, which this one was writing, do not go on. */
export function leave(id: string): void {
  tabs.postMessage({ kind: "left", id } satisfies TabEvent);
}

function settle(id: string): void {
  const held = known.get(id);
  if (!held) return;
  const messages = Object.entries(held.peek().messages).map(([key, message]) => [key, isForeign(message) ? closed(message) : message]);
  held.value = { ...held.peek(), messages: Object.fromEntries(messages) };
}

/** The messages that this tab has begun: of these it knows more than the store. */
const own = new Set<string>();
const isForeign = (message: Message) => message.isPending === true && !own.has(message.id);
const closed = ({ isPending: _, ...message }: Message): Message => ({ ...message, error: CLOSED });
const CLOSED = "This page was closed before the answer had ended.";

/** Takes in what another tab has kept. Messages are never taken away, so two tabs may write at the same time. */
function join(kept: unknown): void {
  const item = readConversation(kept, true);
  if (!item) return;
  const held = known.get(item.id);
  const before = held?.peek();
  const messages = { ...before?.messages, ...item.messages };
  let isNewer = false;
  for (const message of Object.values(before?.messages ?? {})) {
    const other = item.messages[message.id];
    const isKnownBetter = !other || own.has(message.id) || (other.isPending && !message.isPending && message.error !== CLOSED);
    if (!isKnownBetter) continue;
    messages[message.id] = message;
    isNewer ||= !other || (other.isPending === true && !message.isPending);
  }
  const isBusy = Object.values(messages).some((message) => message.isPending && own.has(message.id));
  const [lanes, others] = before && isBusy ? [before.lanes, item.lanes] : [item.lanes, before?.lanes];
  const joined = { ...item, messages };
  // Where one tab has gone on behind the end of the other, both show what is behind it.
  joined.lanes = lanes.map((lane, at) => {
    const head = others?.[at]?.head ?? null;
    return pathTo(joined, head).some((message) => message.id === lane.head) ? { ...lane, head } : lane;
  });
  if (held) held.value = joined;
  else known.set(item.id, signal(joined));
  if (order.peek()[0] !== item.id) order.value = [item.id, ...order.peek().filter((other) => other !== item.id)];
  if (isNewer) save(item.id);
}

/** Why chats are not kept, where the browser has no room or no store for them; empty: they are. */
export const storeTrouble = signal("");

function onFull(error: unknown): void {
  storeTrouble.value = `This browser does not keep the chats: ${error instanceof Error ? error.message : error}`;
}

export function update(id: string, change: (item: Conversation) => Conversation): void {
  const held = known.get(id);
  if (!held) return;
  held.value = { ...change(held.peek()), updated: Date.now() };
  if (!isEmpty(held.peek()) && order.peek()[0] !== id) {
    order.value = [id, ...order.peek().filter((other) => other !== id)];
  }
  save(id);
}

export function updateMessage(id: string, messageId: string, change: Partial<Message>): void {
  update(id, (item) => {
    const message = item.messages[messageId];
    return message ? { ...item, messages: { ...item.messages, [messageId]: { ...message, ...change } } } : item;
  });
}

export function updateSettings(lane: number, change: Partial<Settings>): void {
  const { id } = current().peek();
  update(id, (item) => ({
    ...item,
    lanes: item.lanes.map((old, at) => (at === lane ? { ...old, settings: { ...old.settings, ...change } } : old)),
  }));
  const settings = known.get(id)?.peek().lanes[0]?.settings;
  if (lane === 0 && settings) localStorage.setItem(DEFAULTS, JSON.stringify(settings));
}

/** Adds a message behind another, and lets a lane end with it. */
export function add(id: string, lane: number, message: Omit<Message, "id" | "created">): Message {
  const made: Message = { ...message, id: newId(), created: Date.now() };
  own.add(made.id);
  update(id, (item) => ({
    ...item,
    title: item.title || (made.role === "user" ? titleOf(made.content) : ""),
    messages: { ...item.messages, [made.id]: made },
    lanes: item.lanes.map((old, at) => (at === lane ? { ...old, head: made.id } : old)),
  }));
  return made;
}

function titleOf(text: string): string {
  const line = text.trim().split("\n")[0] ?? "";
  return line.length > 60 ? `${line.slice(0, 58).trimEnd()}…` : line;
}

/** The messages from the first to this one. */
export function pathTo(item: Conversation, head: string | null): Message[] {
  const path: Message[] = [];
  const seen = new Set<string>();
  for (let id = head; id !== null && !seen.has(id); ) {
    seen.add(id);
    const message: Message | undefined = item.messages[id];
    if (!message) break;
    path.push(message);
    id = message.parent;
  }
  return path.reverse();
}

/** The messages that stand in the same place: other answers, or other wordings. */
export function siblings(item: Conversation, message: Message): Message[] {
  return Object.values(item.messages)
    .filter((other) => other.parent === message.parent && other.role === message.role && other.callId === message.callId)
    .sort((one, other) => one.created - other.created);
}

/** Lets a lane go on through this message, to the newest end behind it. */
export function show(id: string, lane: number, messageId: string): void {
  update(id, (item) => {
    let head = messageId;
    for (;;) {
      const next = Object.values(item.messages)
        .filter((other) => other.parent === head)
        .sort((one, other) => other.created - one.created)[0];
      if (!next) break;
      head = next.id;
    }
    return { ...item, lanes: item.lanes.map((old, at) => (at === lane ? { ...old, head } : old)) };
  });
}

export function setCompared(id: string, isCompared: boolean): void {
  update(id, (item) => {
    const [first] = item.lanes;
    return first ? { ...item, lanes: isCompared ? [first, structuredClone(first)] : [first] } : item;
  });
}

export function rename(id: string, title: string): void {
  update(id, (item) => ({ ...item, title }));
}

export async function forget(id: string): Promise<void> {
  drop(id);
  await db.remove("conversations", id);
  tabs.postMessage({ kind: "forgotten", id } satisfies TabEvent);
}

/** Takes back that a conversation was forgotten. */
export async function restore(item: Conversation): Promise<void> {
  known.set(item.id, signal(item));
  order.value = sorted();
  currentId.value = item.id;
  await keep(item);
}

function sorted(): string[] {
  const all = [...known.values()].map((item) => item.peek()).filter((item) => !isEmpty(item));
  return all.sort((one, other) => other.updated - one.updated).map((item) => item.id);
}

function drop(id: string): void {
  clearTimeout(saving.get(id));
  saving.delete(id);
  known.delete(id);
  order.value = order.value.filter((other) => other !== id);
  if (currentId.value === id) {
    if (order.value[0]) currentId.value = order.value[0];
    else begin();
  }
}

export async function loadConversations(): Promise<void> {
  try {
    const kept = (await db.all<unknown>("conversations")).map((item) => readConversation(item)).filter((item) => item !== null);
    kept.sort((one, other) => other.updated - one.updated);
    for (const item of kept) if (!known.has(item.id)) known.set(item.id, signal(item));
    order.value = [...new Set([...order.value, ...kept.map((item) => item.id)])];
  } catch (error) {
    onFull(error);
  } finally {
    isLoaded.value = true;
  }
}

export const isRecord = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);
export const text = (value: unknown, otherwise = "") => (typeof value === "string" ? value : otherwise);
export const number = (value: unknown) => (typeof value === "number" && Number.isFinite(value) ? value : undefined);
export const ID = /^[a-zA-Z0-9-]{1,64}$/;
const FORMATS = ["text", "json_object", "json_schema", "regex", "choice", "grammar"];

function readSettings(value: unknown): Settings {
  const given = isRecord(value) ? value : {};
  return {
    model: text(given.model),
    system: text(given.system),
    params: (isRecord(given.params) ? given.params : {}) as Settings["params"],
    format: (FORMATS.includes(text(given.format)) ? given.format : "text") as FormatKind,
    formats: Object.fromEntries(
      Object.entries(isRecord(given.formats) ? given.formats : {}).map(([kind, held]) => [kind, text(held)]),
    ),
    tools: text(given.tools),
    toolChoice: text(given.toolChoice, "auto"),
    hasTokens: given.hasTokens === true,
    extra: text(given.extra),
  };
}

function readMessage(id: string, value: unknown, isWritten: boolean): Message | null {
  if (!isRecord(value) || !["user", "assistant", "tool"].includes(text(value.role))) return null;
  const calls = Array.isArray(value.calls) ? value.calls.filter(isRecord) : [];
  const tokens = Array.isArray(value.tokens) ? value.tokens.filter(isRecord) : [];
  const stats = isRecord(value.stats) ? value.stats : {};
  const read: Message = {
    id,
    parent: typeof value.parent === "string" ? value.parent : null,
    role: value.role as Role,
    content: text(value.content),
    created: number(value.created) ?? Date.now(),
  };
  if (value.reasoning) read.reasoning = text(value.reasoning);
  if (calls.length)
    read.calls = calls.map((call) => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) }));
  if (value.callId) read.callId = text(value.callId);
  if (tokens.length) read.tokens = tokens.map(readToken);
  if (value.stats)
    read.stats = Object.fromEntries(Object.entries(stats).map(([name, held]) => [name, number(held)])) as Stats;
  if (value.finish) read.finish = text(value.finish);
  if (value.error) read.error = text(value.error);
  if (value.model) read.model = text(value.model);
  if (isRecord(value.request)) read.request = value.request as Message["request"];
  if (value.isPending && isWritten) read.isPending = true;
  return value.isPending && !isWritten ? closed(read) : read;
}

function readToken(value: Record<string, unknown>): Token {
  const top = Array.isArray(value.top) ? value.top.filter(isRecord) : [];
  return {
    text: text(value.text),
    logprob: number(value.logprob) ?? 0,
    top: top.map((other) => ({ text: text(other.text), logprob: number(other.logprob) ?? 0 })),
  };
}

/** Reads a conversation that was kept or exported; null: it is none. Every field is checked: files come from anywhere.
 * `isWritten`: another tab may be writing answers that have not ended. */
export function readConversation(value: unknown, isWritten = false): Conversation | null {
  if (!isRecord(value) || !isRecord(value.messages) || !Array.isArray(value.lanes) || !ID.test(text(value.id))) return null;
  const messages: Conversation["messages"] = {};
  for (const [id, given] of Object.entries(value.messages)) {
    const message = ID.test(id) ? readMessage(id, given, isWritten) : null;
    if (message) messages[id] = message;
  }
  const lanes = value.lanes.filter(isRecord).slice(0, 2);
  if (!lanes.length) return null;
  return {
    id: text(value.id),
    title: text(value.title).slice(0, 200),
    created: number(value.created) ?? Date.now(),
    updated: number(value.updated) ?? Date.now(),
    messages,
    lanes: lanes.map((lane) => ({
      head: typeof lane.head === "string" && messages[lane.head] ? lane.head : null,
      settings: readSettings(lane.settings),
    })),
  };
}

/** Adds conversations of an exported file; returns how many. What is here already is replaced by a newer one alone. */
export async function addConversations(given: unknown[]): Promise<number> {
  let added = 0;
  for (const item of given.map((one) => readConversation(one))) {
    if (!item || isEmpty(item)) continue;
    const held = known.get(item.id);
    if (held && held.peek().updated >= item.updated) continue;
    if (held) held.value = item;
    else known.set(item.id, signal(item));
    await keep(item);
    added += 1;
  }
  order.value = sorted();
  return added;
}
