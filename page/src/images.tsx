/** Images: a prompt, the steps as they are made, and a gallery that stays in this browser. */
import { signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ApiError, imageModels, post, serverTrouble } from "./api";
import { newId } from "./conversations";
import { download, exportGallery, ImportButton } from "./files";
import { addPictures, forgetPicture, gallery, keepPicture, loadGallery, type Picture } from "./gallery";
import { Icon } from "./icons";
import type { Json } from "./json";
import { Dialog, IconButton, route, shortcuts, spoken, tell } from "./shell";
import { shownRequest } from "./snippets";

interface Drawing {
  step: number;
  steps: number;
  preview: string;
  isDone: boolean;
}

const form = signal({ prompt: "", negative: "", n: 1, steps: "", guidance: "", seed: "", previews: "10", sampler: "euler", model: "" });
const drawings = signal<Drawing[]>([]);
const trouble = signal("");
const shown = signal<Picture | null>(null);
const controller = signal<AbortController | null>(null);

const MAX_PREVIEWS = 20;
const EXAMPLES = ["a red circle on a blue background", "the letter K in green", "a yellow triangle on a black background"];
const source = (b64: string) => `data:image/png;base64,${b64.replace(/[^A-Za-z0-9+/=]/g, "")}`;

interface ImageEvent {
  type: string;
  index: number;
  step?: number;
  steps?: number;
  b64_json?: string;
  seed?: number;
  error?: { message: string };
}

function requestBody(): { [field: string]: Json } {
  const given = form.value;
  const body: { [field: string]: Json } = { prompt: given.prompt.trim(), n: given.n, sampler: given.sampler };
  const model = given.model || imageModels()[0]?.id;
  if (model) body.model = model;
  if (given.negative.trim()) body.negative_prompt = given.negative.trim();
  if (given.steps !== "") body.num_inference_steps = Number(given.steps);
  if (given.guidance !== "") body.guidance_scale = Number(given.guidance);
  if (given.seed !== "") body.seed = Number(given.seed);
  return body;
}

async function draw(): Promise<void> {
  if (controller.peek() || !form.peek().prompt.trim()) return;
  const body = requestBody();
  // The server's own seeds have 63 bits, of which JavaScript's numbers would lose ten.
  body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
  const began = performance.now();
  const abort = new AbortController();
  controller.value = abort;
  trouble.value = "";
  drawings.value = Array.from({ length: form.peek().n }, () => ({ step: 0, steps: 0, preview: "", isDone: false }));
  spoken.value = "The image is being made.";
  const change = (index: number, fields: Partial<Drawing>) =>
    (drawings.value = drawings.value.map((old, at) => (at === index ? { ...old, ...fields } : old)));
  try {
    for await (const { data } of post("v1/images/generations", { ...body, stream: true, partial_images: Math.min(MAX_PREVIEWS, Number(form.peek().previews)) }, abort.signal)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data) as ImageEvent;
      if (event.error) throw new ApiError(event.error.message, 0);
      if (event.type === "image_generation.progress") change(event.index, { step: event.step, steps: event.steps });
      if (event.type === "image_generation.partial_image") change(event.index, { preview: event.b64_json });
      if (event.type === "image_generation.completed" && event.b64_json) {
        change(event.index, { preview: event.b64_json, isDone: true });
        const picture: Picture = {
          id: newId(),
          created: Date.now(),
          b64: event.b64_json,
          prompt: String(body.prompt),
          negative: String(body.negative_prompt ?? ""),
          seed: event.seed ?? 0,
          steps: drawings.value[event.index]?.steps ?? 0,
          guidance: body.guidance_scale as number | undefined,
          sampler: String(body.sampler),
          model: String(body.model ?? ""),
          seconds: (performance.now() - began) / 1000,
        };
        await keepPicture(picture);
      }
    }
    spoken.value = "The image is there.";
  } catch (error) {
    if (!abort.signal.aborted) trouble.value = error instanceof ApiError ? [error.message, error.hint].join(" ").trim() : String(error);
  }
  controller.value = null;
  drawings.value = [];
}

shortcuts.push({
  keys: "",
  about: "",
  run: () => controller.peek()?.abort(),
  matches: (event) => route.peek().startsWith("/images") && event.key === "Escape" && controller.peek() !== null,
});

async function forget(picture: Picture): Promise<void> {
  shown.value = null;
  await forgetPicture(picture);
  tell("The image is deleted.", { name: "Undo", run: () => void addPictures([picture]) });
}

function save(picture: Picture): void {
  const bytes = Uint8Array.from(atob(picture.b64), (char) => char.charCodeAt(0));
  download(`weft-${picture.seed}.png`, new Blob([bytes], { type: "image/png" }));
}

function useAgain(picture: Picture): void {
  form.value = {
    ...form.value,
    prompt: picture.prompt,
    negative: picture.negative,
    steps: picture.steps ? String(picture.steps) : "",
    guidance: picture.guidance === undefined ? "" : String(picture.guidance),
    seed: String(picture.seed),
    sampler: picture.sampler,
    n: 1,
  };
  shown.value = null;
  document.getElementById("image-prompt")?.focus();
}

/** A picture that may be very small: its pixels stay sharp. */
function PictureView({ b64, alt }: { b64: string; alt: string }) {
  const isSmall = useSignal(true);
  return (
    <img
      class={isSmall.value ? "pixels" : ""}
      src={source(b64)}
      alt={alt}
      onLoad={(event) => (isSmall.value = event.currentTarget.naturalWidth <= 128)}
    />
  );
}

function DrawingView({ drawing, number }: { drawing: Drawing; number: number }) {
  const { step, steps, preview, isDone } = drawing;
  return (
    <figure class="picture drawing" aria-label={`Image ${number + 1}`}>
      {preview ? <PictureView b64={preview} alt={isDone ? "The image" : `The image after a part of its steps`} /> : <div class="noise" aria-hidden="true" />}
      <figcaption>
        <progress max={steps || 1} value={step} aria-label={`Steps of image ${number + 1}`} />
        <span class="num small">{steps ? `step ${step} of ${steps}` : "waiting"}</span>
      </figcaption>
    </figure>
  );
}

function Lightbox() {
  const picture = shown.value;
  return (
    <Dialog isOpen={picture !== null} title="Image" class="lightbox" onClose={() => (shown.value = null)}>
      {picture && (
        <>
          <div class="lightbox-image">
            <PictureView b64={picture.b64} alt={picture.prompt} />
          </div>
          <p>{picture.prompt}</p>
          <dl class="facts num">
            {(
              [
                ["Seed", picture.seed],
                ["Steps", picture.steps],
                ["Guidance", picture.guidance ?? "auto"],
                ["Sampler", picture.sampler],
                ["Negative", picture.negative],
                ["Model", picture.model],
                ["Took", `${picture.seconds.toFixed(2)} s`],
              ] as [string, string | number][]
            )
              .filter(([, value]) => value !== "")
              .map(([name, value]) => (
                <div key={name}>
                  <dt>{name}</dt>
                  <dd>{value}</dd>
                </div>
              ))}
          </dl>
          <div class="row">
            <button type="button" class="primary" onClick={() => useAgain(picture)}>
              Use these settings
            </button>
            <button type="button" onClick={() => save(picture)}>
              <Icon name="down" /> Download
            </button>
            <span class="grow" />
            <button type="button" class="danger" onClick={() => void forget(picture)}>
              <Icon name="trash" /> Delete
            </button>
          </div>
        </>
      )}
    </Dialog>
  );
}

function Field(props: { name: keyof typeof form.value; label: string; min?: number; max?: number; step?: number; hint: string }) {
  return (
    <label class="field">
      <span>{props.label}</span>
      <input
        type="number"
        class="num"
        placeholder={props.hint}
        min={props.min}
        max={props.max}
        step={props.step ?? 1}
        value={form.value[props.name]}
        onChange={(event) => (form.value = { ...form.value, [props.name]: event.currentTarget.value })}
      />
    </label>
  );
}

export function ImagesView() {
  const given = form.value;
  const cards = imageModels();
  const isDrawing = controller.value !== null;
  useEffect(() => {
    void loadGallery();
  }, []);
  const size = cards.find((card) => card.id === given.model)?.sizes?.[0] ?? cards[0]?.sizes?.[0];
  return (
    <section class="panel images" aria-labelledby="images-title">
      <h1 id="images-title">Images</h1>
      {cards.length === 0 && !serverTrouble.value && <p class="muted">This server has no image model. The operator's setting is --image-model.</p>}
      <form
        class="card image-form"
        onSubmit={(event) => {
          event.preventDefault();
          void draw();
        }}
      >
        <label class="field">
          <span>Prompt</span>
          <textarea
            id="image-prompt"
            rows={2}
            maxLength={4000}
            placeholder={EXAMPLES[0]}
            value={given.prompt}
            onInput={(event) => (form.value = { ...given, prompt: event.currentTarget.value })}
            onKeyDown={(event) => {
              if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
                event.preventDefault();
                void draw();
              }
            }}
          />
        </label>
        {!given.prompt && (
          <div class="row starters-inline">
            {EXAMPLES.map((example) => (
              <button key={example} type="button" onClick={() => (form.value = { ...given, prompt: example })}>
                {example}
              </button>
            ))}
          </div>
        )}
        <div class="image-fields">
          {cards.length > 1 && (
            <label class="field">
              <span>Model</span>
              <select value={given.model} onChange={(event) => (form.value = { ...given, model: event.currentTarget.value })}>
                {cards.map((card) => (
                  <option key={card.id}>{card.id}</option>
                ))}
              </select>
            </label>
          )}
          <label class="field">
            <span>Images</span>
            <select value={given.n} onChange={(event) => (form.value = { ...given, n: Number(event.currentTarget.value) })}>
              {[1, 2, 3, 4, 6, 8, 10].map((number) => (
                <option key={number}>{number}</option>
              ))}
            </select>
          </label>
          <Field name="steps" label="Steps" min={1} max={1000} hint="auto" />
          <Field name="guidance" label="Guidance" min={0} max={50} step={0.5} hint="auto" />
          <Field name="seed" label="Seed" max={Number.MAX_SAFE_INTEGER} hint="any" />
          <Field name="previews" label="Previews" min={0} max={MAX_PREVIEWS} hint="0" />
          <label class="field">
            <span>Sampler</span>
            <select value={given.sampler} onChange={(event) => (form.value = { ...given, sampler: event.currentTarget.value })}>
              <option>euler</option>
              <option>heun</option>
            </select>
          </label>
          <label class="field negative">
            <span>Negative prompt</span>
            <input maxLength={4000} placeholder="What it is steered away from" value={given.negative} onInput={(event) => (form.value = { ...given, negative: event.currentTarget.value })} />
          </label>
        </div>
        <div class="row">
          {isDrawing ? (
            <button type="button" onClick={() => controller.peek()?.abort()}>
              <Icon name="stop" /> Stop
            </button>
          ) : (
            <button type="submit" class="primary" disabled={!given.prompt.trim() || cards.length === 0}>
              Make {given.n === 1 ? "the image" : `${given.n} images`}
            </button>
          )}
          <IconButton
            icon="code"
            label="Copy as curl or Python"
            disabled={!given.prompt.trim()}
            onClick={() => (shownRequest.value = { path: "v1/images/generations", body: requestBody() })}
          />
          {size && <span class="muted small num">{size} pixels</span>}
        </div>
        {trouble.value && (
          <p class="problem" role="alert">
            {trouble.value}
          </p>
        )}
      </form>
      {drawings.value.length > 0 && (
        <div class="gallery" aria-label="In the making">
          {drawings.value.map((drawing, at) => (
            <DrawingView key={at} drawing={drawing} number={at} />
          ))}
        </div>
      )}
      <div class="row gallery-head">
        <h2 class="grow">Gallery</h2>
        {gallery.value.length > 0 && <span class="muted small num">{gallery.value.length} in this browser</span>}
        <button type="button" disabled={gallery.value.length === 0} onClick={exportGallery}>
          <Icon name="down" /> Export
        </button>
        <ImportButton what="images" />
      </div>
      {gallery.value.length === 0 && drawings.value.length === 0 ? (
        <p class="muted">Images that you make appear here, with the seed that gives each again.</p>
      ) : (
        <ul class="gallery">
          {gallery.value.map((picture) => (
            <li key={picture.id}>
              <button type="button" class="picture" onClick={() => (shown.value = picture)} aria-label={`Show: ${picture.prompt}, seed ${picture.seed}`}>
                <PictureView b64={picture.b64} alt="" />
                <span class="caption">{picture.prompt}</span>
                <span class="muted small num">seed {picture.seed}</span>
              </button>
            </li>
          ))}
        </ul>
      )}
      <Lightbox />
    </section>
  );
}
