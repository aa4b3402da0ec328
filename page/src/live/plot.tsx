/** Plots on a canvas, each with its text beside it. Time runs to the left; between two snapshots it moves on smoothly,
 * unless the reader wants no motion. */
import { useEffect, useRef } from "preact/hooks";
import { cameAt } from "./store";

export interface Series {
  name: string;
  /** A variable of the style sheet. */
  colour: string;
  /** One value a snapshot; null: there is none. */
  values: (number | null)[];
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");

type Draw = (context: CanvasRenderingContext2D, width: number, height: number, colour: (name: string) => string) => void;

/** A canvas in the size of its place that is drawn anew when `draw` changes; with `moves`, at every frame. */
export function Canvas(props: { draw: Draw; label: string; height: number; moves?: boolean; class?: string }) {
  const element = useRef<HTMLCanvasElement>(null);
  const draw = useRef(props.draw);
  draw.current = props.draw;
  useEffect(() => {
    const canvas = element.current;
    const context = canvas?.getContext("2d");
    if (!canvas || !context) return;
    const styles = getComputedStyle(document.documentElement);
    const colour = (name: string) => styles.getPropertyValue(name).trim();
    let frame = 0;
    const paint = () => {
      const scale = devicePixelRatio || 1;
      const { clientWidth, clientHeight } = canvas;
      if (canvas.width !== Math.round(clientWidth * scale) || canvas.height !== Math.round(clientHeight * scale)) {
        canvas.width = Math.round(clientWidth * scale);
        canvas.height = Math.round(clientHeight * scale);
      }
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, clientWidth, clientHeight);
      draw.current(context, clientWidth, clientHeight, colour);
      if (props.moves && !calm.matches) frame = requestAnimationFrame(paint);
    };
    paint();
    return () => cancelAnimationFrame(frame);
  });
  return (
    <canvas
      ref={element}
      role="img"
      aria-label={props.label}
      class={`plot ${props.class ?? ""}`}
      height={props.height}
    />
  );
}

/** How many widths of a snapshot the plot has moved since the last one came. */
function moved(tick: number): number {
  return calm.matches ? 1 : Math.min(1, (performance.now() - cameAt) / (1000 * tick));
}

export function ceiling(value: number): number {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 5, 10].find((step) => step * power >= value) ?? 10) * power;
}

function axis(context: CanvasRenderingContext2D, width: number, height: number, top: string, colour: (name: string) => string) {
  context.strokeStyle = colour("--line");
  context.lineWidth = 1;
  for (const at of [0.5, Math.round(height / 2) + 0.5, height - 0.5]) {
    context.beginPath();
    context.moveTo(0, at);
    context.lineTo(width, at);
    context.stroke();
  }
  context.fillStyle = colour("--muted");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillText(top, 4, 4);
}

/** With `isLog`, a third of the height is a power of ten at least. */
export function lines(series: Series[], length: number, tick: number, shown: (value: number) => string, isLog = false): Draw {
  return (context, width, height, colour) => {
    const all = series.flatMap((one) => one.values.filter((value) => value !== null && value > 0)) as number[];
    const most = isLog && all.length ? 10 ** Math.ceil(Math.log10(Math.max(...all))) : ceiling(Math.max(...all, 0));
    const least = isLog && all.length ? Math.min(10 ** Math.floor(Math.log10(Math.min(...all))), most / 1000) : 0;
    const share = (value: number) =>
      least ? Math.log10(Math.max(value, least) / least) / Math.log10(most / least) : value / most;
    axis(context, width, height, shown(most), colour);
    if (least) context.fillText(shown(least), 4, height - 15);
    const step = width / (length - 1);
    const shift = (1 - moved(tick)) * step;
    for (const one of series) {
      context.strokeStyle = colour(one.colour);
      context.lineWidth = 1.75;
      context.lineJoin = "round";
      context.beginPath();
      let isOn = false;
      const first = length - one.values.length;
      one.values.forEach((value, at) => {
        if (value === null) return void (isOn = false);
        const x = (first + at) * step + shift;
        const y = height - 1 - share(value) * (height - 4);
        if (isOn) context.lineTo(x, y);
        else context.moveTo(x, y);
        // A value alone is a dot.
        if (!isOn && (one.values[at + 1] ?? null) === null) context.arc(x, y, 1, 0, 7);
        isOn = true;
      });
      context.stroke();
    }
  };
}

/** Stacked columns, one a snapshot. */
export function band(series: Series[], length: number, tick: number, shown: (value: number) => string): Draw {
  return (context, width, height, colour) => {
    const counts = series[0]?.values.length ?? 0;
    const totals = Array.from({ length: counts }, (_, at) => series.reduce((sum, one) => sum + (one.values[at] ?? 0), 0));
    const most = ceiling(Math.max(...totals, 0));
    axis(context, width, height, shown(most), colour);
    const step = width / length;
    const shift = (1 - moved(tick)) * step;
    for (let at = 0; at < counts; at++) {
      let y = height;
      for (const one of series) {
        const part = ((one.values[at] ?? 0) / most) * (height - 4);
        if (part <= 0) continue;
        context.fillStyle = colour(one.colour);
        context.fillRect((length - counts + at) * step + shift, y - part, Math.max(1, step - 0.6), part);
        y -= part;
      }
    }
  };
}

/** The cells of a cache's blocks: in use, cached, free. A cell of many blocks is as strong as its share. */
export function blockMap(used: string, cached: string): Draw {
  return (context, width, height, colour) => {
    const count = used.length;
    const columns = Math.max(1, Math.ceil(Math.sqrt((count * width) / height)));
    const rows = Math.ceil(count / columns);
    const size = Math.min(width / columns, height / rows);
    const gap = size > 5 ? 1 : size > 3 ? 0.5 : 0;
    const cell = (at: number, name: string, strength: number) => {
      context.globalAlpha = strength;
      context.fillStyle = colour(name);
      context.fillRect((at % columns) * size, Math.floor(at / columns) * size, size - gap, size - gap);
    };
    for (let at = 0; at < count; at++) {
      const inUse = parseInt(used[at] ?? "0", 16) / 15;
      const kept = parseInt(cached[at] ?? "0", 16) / 15;
      cell(at, "--line", 0.75);
      if (kept > 0) cell(at, "--prefill", 0.25 + 0.6 * kept);
      if (inUse > 0) cell(at, "--decode", 0.3 + 0.7 * inUse);
    }
    context.globalAlpha = 1;
  };
}
