/** The live engine view, at #/live. */
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { apiKey } from "../api";
import { theme } from "../shell";
import { band, blockMap, Canvas, lines, type Series } from "./plot";
import "./live.css";
import {
  ended, isPaused, type Kind, KINDS, keyOf, type Latency, type LiveModel, type PhaseName, snapshots, type Timeline,
  togglePause, trouble, unwatch, watch,
} from "./store";

const LENGTH = 120;
const SHOWN_REQUESTS = 40;
const chosen = signal("");

const KIND_NAMES: Record<Kind, string> = { decode: "Decode", prefill: "Prefill", denoise: "Denoise", encode: "Encode" };
const PHASES: PhaseName[] = ["wait", "queue", "prefill", "encode", "decode", "denoise", "tool"];

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const figure = (value: number) => (value >= 100 ? whole : fine).format(value);

function seconds(value: number): string {
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.9995) return `${value < 0.01 ? fine.format(value * 1000) : Math.round(value * 1000)} ms`;
  return `${value < 100 ? value.toFixed(1) : Math.round(value)} s`;
}

function bytes(value: number): string {
  if (!value) return "unknown";
  return value >= 1 << 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

function Tile({ name, value, note }: { name: string; value: string; note?: string }) {
  return (
    <div class="tile">
      <dt>{name}</dt>
      <dd>
        <span class="num tile-value">{value}</span>
        {note && <span class="muted small num">{note}</span>}
      </dd>
    </div>
  );
}

function Legend({ items }: { items: { name: string; colour: string; value: string }[] }) {
  return (
    <ul class="legend small">
      {items.map(({ name, colour, value }) => (
        <li key={name}>
          <span class={`swatch ${colour}`} aria-hidden="true" />
          {name} <span class="num muted">{value}</span>
        </li>
      ))}
    </ul>
  );
}

function latency(name: string, figures: Latency | null) {
  return <Tile name={name} value={figures ? seconds(figures.p50_s) : "–"} note={figures ? `p95 ${seconds(figures.p95_s)}` : "p50"} />;
}

type Rate = keyof NonNullable<LiveModel["throughput"]>;

function speeds(model: LiveModel, rate: Rate): (number | null)[] {
  return smooth(past(model.name, (one) => one.throughput?.[rate] ?? null));
}

function Tiles({ model }: { model: LiveModel }) {
  const { throughput, blocks } = model;
  const mean = (rate: Rate) => lastOf(speeds(model, rate));
  const output = mean("output_tokens_per_s");
  const prompts = mean("prompt_tokens_per_s");
  return (
    <dl class="tiles">
      <Tile name="Running" value={whole.format(model.running)} note={`${whole.format(model.waiting)} waiting`} />
      <Tile
        name="Output"
        value={output === null ? "–" : figure(output)}
        note="tok/s"
      />
      <Tile name="Prompts" value={prompts === null ? "–" : figure(prompts)} note="tok/s" />
      {throughput && (throughput.denoise_steps_per_s > 0 || throughput.images_per_s > 0) && (
        <Tile name="Images a second" value={fine.format(mean("images_per_s") ?? 0)} note={`${figure(mean("denoise_steps_per_s") ?? 0)} steps/s`} />
      )}
      {latency("First token", model.ttft)}
      {latency("Between tokens", model.inter_token)}
      <Tile
        name="KV cache"
        value={blocks?.total ? `${fine.format((100 * blocks.used) / blocks.total)} %` : "–"}
        note={blocks ? `${whole.format(blocks.used)} of ${whole.format(blocks.total)}` : ""}
      />
      <Tile name="Restarts" value={whole.format(model.restarts)} note={`${whole.format(model.preemptions)} preemptions`} />
    </dl>
  );
}

/** The values of one model in every snapshot. */
function past<T>(name: string, read: (model: LiveModel, tick: number) => T | null): (T | null)[] {
  return snapshots.value.map((one) => {
    const model = one.models.find((found) => found.name === name);
    return model ? read(model, one.tick_s) : null;
  });
}

/** The means of four values each, two seconds: a slow engine makes fewer steps than there are snapshots. */
function smooth(values: (number | null)[]): (number | null)[] {
  return values.map((value, at) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, at - 3), at + 1).filter((one) => one !== null);
    return near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}

function lastOf(values: (number | null)[]): number | null {
  return values[values.length - 1] ?? null;
}

function StepBudget({ model, tick }: { model: LiveModel; tick: number }) {
  const series: Series[] = KINDS.map((kind) => ({
    name: KIND_NAMES[kind],
    colour: `--${kind}`,
    values: past(model.name, (one, seconds) => (one.spent && seconds ? one.spent[kind] / seconds : null)),
  }));
  const means = Object.fromEntries(series.map((one) => [one.colour, lastOf(smooth(one.values)) ?? 0]));
  const now = (kind: Kind) => means[`--${kind}`] ?? 0;
  const steps = lastOf(smooth(past(model.name, (one, seconds) => (one.spent && seconds ? one.spent.steps / seconds : null)))) ?? 0;
  const said = KINDS.map((kind) => `${KIND_NAMES[kind].toLowerCase()} ${figure(now(kind))}`).join(", ");
  return (
    <figure class="card live-wide" data-testid="step-budget">
      <figcaption>
        <h2>Step budget</h2>
        <span class="muted small num">{`${fine.format(steps)} steps/s, tokens a second by kind of work`}</span>
      </figcaption>
      <Canvas
        draw={band(series, LENGTH, tick, (most) => `${figure(most)} tok/s`)}
        label={`Tokens of the steps' budgets by kind in the last minute; now, a second: ${said}.`}
        height={150}
        moves
      />
      <Legend items={KINDS.map((kind) => ({ name: KIND_NAMES[kind], colour: kind, value: figure(now(kind)) }))} />
    </figure>
  );
}

function Plots({ model, tick }: { model: LiveModel; tick: number }) {
  const speed: Series[] = [
    { name: "Output tokens", colour: "--decode", values: speeds(model, "output_tokens_per_s") },
    { name: "Prompt tokens", colour: "--prefill", values: speeds(model, "prompt_tokens_per_s") },
    { name: "Denoise steps", colour: "--denoise", values: speeds(model, "denoise_steps_per_s") },
  ];
  const late: Series[] = [
    { name: "Time to first token", colour: "--prefill", values: past(model.name, (one) => one.ttft?.p50_s ?? null) },
    { name: "Between tokens", colour: "--decode", values: past(model.name, (one) => one.inter_token?.p50_s ?? null) },
  ];
  const items = (all: Series[], shown: (value: number) => string) =>
    all.map((one) => {
      const value = lastOf(one.values);
      return { name: one.name, colour: one.colour.slice(2), value: value === null ? "–" : shown(value) };
    });
  const rates = items(speed, (value) => `${figure(value)}/s`);
  const latencies = items(late, seconds);
  const said = (all: { name: string; value: string }[]) => all.map(({ name, value }) => `${name.toLowerCase()} ${value}`).join(", ");
  return (
    <>
      <figure class="card">
        <figcaption>
          <h2>Throughput</h2>
          <span class="muted small">a second</span>
        </figcaption>
        <Canvas draw={lines(speed, LENGTH, tick, (most) => `${figure(most)}/s`)} label={`Throughput in the last minute; now ${said(rates)}.`} height={130} moves />
        <Legend items={rates} />
      </figure>
      <figure class="card">
        <figcaption>
          <h2>Latency</h2>
          <span class="muted small">median of the last ten seconds, on a logarithmic scale</span>
        </figcaption>
        <Canvas draw={lines(late, LENGTH, tick, seconds, true)} label={`Median latencies in the last minute; now ${said(latencies)}.`} height={130} moves />
        <Legend items={latencies} />
      </figure>
    </>
  );
}

function CacheMap({ model }: { model: LiveModel }) {
  const blocks = model.blocks;
  if (!blocks) return null;
  const free = blocks.total - blocks.used - (blocks.cached ?? 0);
  const items = [
    { name: "In use", colour: "decode", value: whole.format(blocks.used) },
    ...(blocks.cached === null ? [] : [{ name: "Cached", colour: "prefill", value: whole.format(blocks.cached) }]),
    { name: blocks.cached === null ? "Free or cached" : "Free", colour: "line", value: whole.format(free) },
  ];
  const perCell = blocks.blocks_per_cell ?? 1;
  const said = items.map(({ name, value }) => `${value} ${name.toLowerCase()}`).join(", ");
  return (
    <figure class="card" data-testid="kv-map">
      <figcaption>
        <h2>KV cache blocks</h2>
        <span class="muted small num">
          {`${blocks.block_size} tokens a block`}
          {blocks.used_cells && perCell > 1 && `, ${perCell} blocks a cell`}
        </span>
      </figcaption>
      {blocks.used_cells && blocks.cached_cells ? (
        <Canvas draw={blockMap(blocks.used_cells, blocks.cached_cells)} label={`Map of ${whole.format(blocks.total)} blocks: ${said}.`} height={170} class="map" />
      ) : (
        <p class="muted small">{model.not_told || "The map is being read."}</p>
      )}
      <Legend items={items} />
    </figure>
  );
}

function Models({ models }: { models: LiveModel[] }) {
  return (
    <div class="card scroll-x">
      <h2>Models</h2>
      <table class="small">
        <thead>
          <tr>
            {["Name", "State", "Engine", "Memory", "Running", "Waiting", "Restarts"].map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {models.map((model) => (
            <tr key={model.name}>
              <th scope="row">{model.name}</th>
              <td>
                <span class={`state ${model.state}`}>{model.state}</span> {model.stage}
              </td>
              <td>{[model.engine, model.device].filter(Boolean).join(" on ")}</td>
              <td class="num">{bytes(model.memory_bytes)}</td>
              <td class="num">{model.running}</td>
              <td class="num">{model.waiting}</td>
              <td class="num">{model.restarts}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function total(one: Timeline): number {
  return one.phases.reduce((sum, [, length]) => sum + length, 0);
}

function work(one: Timeline): string {
  if (one.steps) return `${one.steps[0]} of ${one.steps[1]} steps`;
  if (one.kind === "embedding") return `${whole.format(one.prompt_tokens)} tokens`;
  return `${whole.format(one.prompt_tokens)} → ${whole.format(one.tokens)} tokens`;
}

function Requests() {
  const open = snapshots.value[snapshots.value.length - 1]?.open ?? [];
  const all = [...open, ...[...ended.value].reverse()].slice(0, SHOWN_REQUESTS);
  const longest = Math.max(...all.map(total), 0.001);
  return (
    <div class="card live-wide scroll-x">
      <h2>Recent requests</h2>
      {all.length === 0 && <p class="muted small">None yet.</p>}
      {all.length > 0 && (
        <>
          <ul class="legend small" aria-hidden="true">
            {PHASES.map((name) => (
              <li key={name}>
                <span class={`swatch ${name}`} />
                {name}
              </li>
            ))}
          </ul>
          <table class="small requests" data-testid="requests">
            <thead>
              <tr>
                <th scope="col">Request</th>
                <th scope="col">State</th>
                <th scope="col">Work</th>
                <th scope="col">Time</th>
                <th scope="col" class="bar-column">
                  Timeline
                </th>
              </tr>
            </thead>
            <tbody>
              {all.map((one) => {
                const said = one.phases.map(([name, length]) => `${name} ${seconds(length)}`).join(", ");
                let at = 0;
                return (
                  <tr key={keyOf(one)}>
                    <th scope="row" class="mono" title={one.id}>
                      {one.id.slice(0, 8)}
                    </th>
                    <td>
                      <span class={`state ${one.state}`}>{one.state === "open" ? "running" : one.state}</span>
                    </td>
                    <td class="num">{work(one)}</td>
                    <td class="num">{seconds(total(one))}</td>
                    <td class="bar-column">
                      <svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label={said}>
                        <title>{said}</title>
                        {one.phases.map(([name, length]) => {
                          const x = (100 * at) / longest;
                          at += length;
                          return <rect key={name} class={name} x={x} y="0" width={Math.max(0.25, (100 * length) / longest)} height="10" />;
                        })}
                      </svg>
                    </td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </>
      )}
    </div>
  );
}

export function LivePanel() {
  useEffect(() => {
    const seen = () => (document.hidden ? unwatch() : watch());
    document.addEventListener("visibilitychange", seen);
    watch();
    return () => {
      document.removeEventListener("visibilitychange", seen);
      unwatch();
    };
  }, [apiKey.value]);
  theme(); // The colours of the plots are those of the theme.
  const latest = snapshots.value[snapshots.value.length - 1];
  const models = latest?.models ?? [];
  const model = models.find((one) => one.name === chosen.value) ?? models.find((one) => one.running) ?? models[0];
  const state = trouble.value ? "lost" : isPaused.value ? "paused" : latest ? "live" : "connecting";
  return (
    <section class="panel live" aria-labelledby="live-title">
      <header class="live-head">
        <h1 id="live-title">Live engine</h1>
        <span class={`pill ${state}`} role="status">
          {state}
        </span>
        <span class="grow" />
        {models.length > 1 && (
          <label class="row small">
            <span class="muted">Model</span>
            <select value={model?.name} onChange={(event) => (chosen.value = event.currentTarget.value)}>
              {models.map((one) => (
                <option key={one.name}>{one.name}</option>
              ))}
            </select>
          </label>
        )}
        <button type="button" aria-pressed={isPaused.value} onClick={togglePause}>
          {isPaused.value ? "Go on" : "Pause"}
        </button>
      </header>
      {trouble.value && (
        <p class="error" role="alert">
          {trouble.value}
        </p>
      )}
      {!latest && !trouble.value && <p class="muted">Waiting for the first snapshot.</p>}
      {latest && model && (
        <>
          <Tiles model={model} />
          {model.not_told && <p class="muted small">{model.not_told}</p>}
          <div class="live-grid">
            {model.blocks && <StepBudget model={model} tick={latest.tick_s} />}
            <Plots model={model} tick={latest.tick_s || 1} />
            <CacheMap model={model} />
            <Models models={models} />
            <Requests />
          </div>
        </>
      )}
    </section>
  );
}
