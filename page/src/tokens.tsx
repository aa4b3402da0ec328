/** The tokens of an answer: the less likely one was, the stronger its colour. The pointer and the arrow keys show its
 * probability, and what the model could have written instead. */
import { useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import type { Token } from "./conversations";

const percent = (logprob: number) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};

/** From 0, surely this token, to 4, hardly. */
const level = (logprob: number) => {
  const share = Math.exp(logprob);
  return share > 0.9 ? 0 : share > 0.6 ? 1 : share > 0.3 ? 2 : share > 0.1 ? 3 : 4;
};

export const shown = (text: string) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (gap) => "␣".repeat(gap.length)) || "(empty)";

export function TokenView({ tokens }: { tokens: Token[] }) {
  const at = useSignal(-1);
  const place = useSignal({ left: 0, top: 0 });
  const box = useRef<HTMLDivElement>(null);

  const pick = (index: number) => {
    const held = box.current;
    const item = held?.querySelector<HTMLElement>(`[data-at="${index}"]`);
    if (!held || !item) return;
    const outer = held.getBoundingClientRect();
    const inner = item.getBoundingClientRect();
    place.value = {
      left: Math.max(0, Math.min(inner.left - outer.left, outer.width - 250)),
      top: inner.bottom - outer.top + 6,
    };
    at.value = index;
  };
  const token = tokens[at.value];
  return (
    <div
      class="tokens"
      ref={box}
      tabIndex={0}
      role="group"
      aria-label="Tokens of the answer. The arrow keys go from one to the next."
      onPointerOver={(event) => {
        const found = (event.target as HTMLElement).closest<HTMLElement>("[data-at]");
        if (found) pick(Number(found.dataset.at));
      }}
      onPointerLeave={() => (at.value = -1)}
      onBlur={() => (at.value = -1)}
      onKeyDown={(event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (step) {
          event.preventDefault();
          pick(Math.max(0, Math.min(tokens.length - 1, at.value + step)));
        } else if (event.key === "Escape") at.value = -1;
      }}
    >
      {tokens.map((item, index) => (
        <span key={index} data-at={index} class={`token p${level(item.logprob)} ${index === at.value ? "picked" : ""}`}>
          {item.text.includes("\n") ? (
            <>
              {item.text.replaceAll("\n", "⏎")}
              <br />
            </>
          ) : (
            item.text
          )}
        </span>
      ))}
      {token && (
        <div class="token-card" style={{ left: `${place.value.left}px`, top: `${place.value.top}px` }} role="status">
          <div class="row">
            <code class="grow">{shown(token.text)}</code>
            <strong class="num">{percent(token.logprob)}</strong>
          </div>
          <div class="muted small num">
            token {at.value + 1} of {tokens.length}, log probability {token.logprob.toFixed(3)}
          </div>
          <ol class="alternatives">
            {token.top.map((other, rank) => (
              <li key={rank} class={other.text === token.text ? "chosen" : ""}>
                <code>{shown(other.text)}</code>
                <meter min={0} max={1} value={Math.exp(other.logprob)} aria-hidden="true" />
                <span class="num">{percent(other.logprob)}</span>
              </li>
            ))}
          </ol>
        </div>
      )}
    </div>
  );
}
