/** Calls to the server that this page came from. The key goes in a header, never in a URL. */
import { signal } from "@preact/signals";

/** The folder that the page was served from: a proxy may put a path before it. */
export const BASE = new URL(".", document.baseURI);

const KEY = "weft.key";

export const apiKey = signal(sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "");
/** Why a key is asked for; empty: the dialog is closed. */
export const keyWanted = signal("");
export const isKeyRefused = signal(false);
export const isKeyRemembered = signal(localStorage.getItem(KEY) !== null);

export function setKey(key: string, remembered: boolean): void {
  apiKey.value = key;
  isKeyRefused.value = false;
  isKeyRemembered.value = remembered && key !== "";
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key) (remembered ? localStorage : sessionStorage).setItem(KEY, key);
}

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly hint = "",
    readonly code = "",
  ) {
    super(message);
  }
}

export function urlOf(path: string): string {
  return new URL(path.replace(/^\//, ""), BASE).href;
}

/** Sends a request; throws an ApiError for every answer that is none of 2xx. A 401 opens the dialog for a key. */
export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  const used = apiKey.value;
  if (used) headers.set("Authorization", `Bearer ${used}`);
  if (typeof options.body === "string") headers.set("Content-Type", "application/json");
  let response: Response;
  try {
    response = await fetch(urlOf(path), { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server does not answer.", 0, "Is it running? The page tries again when you do.");
  }
  if (response.ok) return response;
  const problem = await errorOf(response);
  if (response.status === 401) {
    isKeyRefused.value = used !== "";
    keyWanted.value = used ? "The server did not accept this key." : "This server asks for an API key.";
  }
  throw problem;
}

async function errorOf(response: Response): Promise<ApiError> {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text) as { error: { message: string; hint?: string; code?: string } };
    return new ApiError(error.message, response.status, error.hint ?? "", error.code ?? "");
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}.`, response.status);
  }
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await (await request(path, { signal })).json()) as T;
}

export interface ServerEvent {
  event: string;
  data: string;
}

/** The most that one event may hold: an image in base64 is far below. */
const MAX_EVENT_CHARS = 64 << 20;

/** Yields the server-sent events of an answer, until it ends or is aborted. */
export async function* events(response: Response): AsyncGenerator<ServerEvent> {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "";
  let data: string[] = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      if (rest.length > MAX_EVENT_CHARS) throw new ApiError("An event of the answer is too large.", 0);
      const lines = rest.split(/\r\n|\n|\r/);
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

export async function* post(path: string, body: unknown, signal: AbortSignal): AsyncGenerator<ServerEvent> {
  yield* events(await request(path, { method: "POST", body: JSON.stringify(body), signal }));
}

export interface ModelCard {
  id: string;
  max_model_len?: number;
  capabilities?: string[];
  state?: string;
  sizes?: string[];
  parent?: string;
}

export const models = signal<ModelCard[]>([]);
export const version = signal("");
/** Why the server's models are not known; empty: they are, or are being asked for. */
export const serverTrouble = signal("");

let asked: Promise<void> | undefined;

/** Waits until the server has told its models, or why it does not. */
export async function modelsAsked(): Promise<void> {
  await (asked ?? loadModels());
}

export function loadModels(): Promise<void> {
  asked = askForModels();
  return asked;
}

async function askForModels(): Promise<void> {
  try {
    models.value = (await getJson<{ data: ModelCard[] }>("v1/models")).data;
    serverTrouble.value = "";
    version.value = (await getJson<{ version: string }>("version")).version;
  } catch (error) {
    serverTrouble.value = error instanceof Error ? error.message : String(error);
  }
}

export function chatModels(): ModelCard[] {
  return models.value.filter((card) => card.capabilities?.includes("chat") ?? true);
}

export function imageModels(): ModelCard[] {
  return models.value.filter((card) => card.capabilities?.includes("images"));
}
