/** The stream of the server's live view, and the last minute of what it told. */
import { signal } from "@preact/signals";
import { ApiError, events, request } from "../api";

export type Kind = "decode" | "prefill" | "denoise" | "encode";
export const KINDS: Kind[] = ["decode", "prefill", "denoise", "encode"];

export interface Latency {
  count: number;
  mean_s: number;
  p50_s: number;
  p95_s: number;
}

export interface Blocks {
  total: number;
  used: number;
  block_size: number;
  cached: number | null;
  blocks_per_cell: number | null;
  used_cells: string | null;
  cached_cells: string | null;
}

export interface LiveModel {
  name: string;
  state: string;
  stage: string;
  engine: string;
  device: string;
  memory_bytes: number;
  running: number;
  waiting: number;
  restarts: number;
  preemptions: number;
  spent: ({ steps: number } & Record<Kind, number>) | null;
  throughput: {
    prompt_tokens_per_s: number;
    output_tokens_per_s: number;
    images_per_s: number;
    denoise_steps_per_s: number;
  } | null;
  ttft: Latency | null;
  inter_token: Latency | null;
  blocks: Blocks | null;
  not_told: string;
}

export type PhaseName = "wait" | "queue" | "prefill" | "decode" | "tool" | "encode" | "denoise";

export interface Timeline {
  id: string;
  answer_id: string;
  model: string;
  kind: "text" | "image" | "embedding";
  state: string;
  began: number;
  phases: [PhaseName, number][];
  choices: number;
  prompt_tokens: number;
  tokens: number;
  steps: [number, number] | null;
}

export interface Snapshot {
  time: number;
  tick_s: number;
  models: LiveModel[];
  open: Timeline[];
  ended: Timeline[];
}

/** The snapshots that the plots show: a minute of them. */
const KEPT = 120;
const ENDED_KEPT = 100;
const RETRY_MS = [500, 1000, 2000, 5000];

export const snapshots = signal<Snapshot[]>([]);
export const ended = signal<Timeline[]>([]);
/** When the last snapshot came, by `performance.now()`: the plots move on from there. */
export let cameAt = 0;
/** Why nothing comes; empty: it does. */
export const trouble = signal("");
export const isPaused = signal(false);

let stop: AbortController | null = null;

/** Watches until `unwatch` is called. A hidden page watches nothing: the server then has nothing to do for it. */
export function watch(): void {
  if (stop || document.hidden || isPaused.value) return;
  stop = new AbortController();
  void follow(stop.signal);
}

export function unwatch(): void {
  stop?.abort();
  stop = null;
}

export function togglePause(): void {
  isPaused.value = !isPaused.value;
  if (isPaused.value) unwatch();
  else watch();
}

async function follow(signal: AbortSignal): Promise<void> {
  for (let failures = 0; !signal.aborted; ) {
    try {
      for await (const event of events(await request("live", { signal }))) {
        take(JSON.parse(event.data) as Snapshot);
        failures = 0;
      }
      trouble.value = "The server ended the stream.";
    } catch (error) {
      if (signal.aborted) return;
      trouble.value = error instanceof Error ? error.message : String(error);
      if (error instanceof ApiError && error.status === 404) {
        trouble.value = "The live view is off: the server was started with --no-live.";
        return;
      }
      // The dialog asks for a key, and a new one begins again.
      if (error instanceof ApiError && error.status === 401) {
        stop = null;
        return;
      }
    }
    const wait = RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)];
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function take(snapshot: Snapshot): void {
  trouble.value = "";
  cameAt = performance.now();
  snapshots.value = [...snapshots.value, snapshot].slice(-KEPT);
  if (snapshot.ended.length) {
    const known = new Set(ended.value.map(keyOf));
    const fresh = snapshot.ended.filter((one) => !known.has(keyOf(one)));
    ended.value = [...ended.value, ...fresh].slice(-ENDED_KEPT);
  }
}

/** Ids are the clients', who may use one twice. */
export function keyOf(one: Timeline): string {
  return `${one.id} ${one.answer_id} ${Math.round(one.began)}`;
}
