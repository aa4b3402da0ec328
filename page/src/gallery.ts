/** The images that this browser keeps, the newest first. */
import { signal } from "@preact/signals";
import { ID, isRecord, number, text } from "./conversations";
import * as db from "./db";

export interface Picture {
  id: string;
  created: number;
  b64: string;
  prompt: string;
  negative: string;
  seed: number;
  steps: number;
  guidance?: number;
  sampler: string;
  model: string;
  seconds: number;
}

export const gallery = signal<Picture[]>([]);

const MAX_PROMPT_CHARS = 4000;
const PNG = /^iVBORw0KGgo[A-Za-z0-9+/]*={0,2}$/;

/** Reads a picture that was kept or exported; null: it is none. */
function readPicture(value: unknown): Picture | null {
  if (!isRecord(value) || !ID.test(text(value.id)) || !PNG.test(text(value.b64))) return null;
  return {
    id: text(value.id),
    created: number(value.created) ?? Date.now(),
    b64: text(value.b64),
    prompt: text(value.prompt).slice(0, MAX_PROMPT_CHARS),
    negative: text(value.negative).slice(0, MAX_PROMPT_CHARS),
    seed: number(value.seed) ?? 0,
    steps: number(value.steps) ?? 0,
    guidance: number(value.guidance),
    sampler: text(value.sampler, "euler"),
    model: text(value.model),
    seconds: number(value.seconds) ?? 0,
  };
}

export async function loadGallery(): Promise<void> {
  const kept = (await db.all<unknown>("images")).map(readPicture).filter((picture) => picture !== null);
  gallery.value = kept.sort((one, other) => other.created - one.created);
}

export async function keepPicture(picture: Picture): Promise<void> {
  gallery.value = [picture, ...gallery.value];
  await db.put("images", picture);
}

export async function forgetPicture(picture: Picture): Promise<void> {
  gallery.value = gallery.value.filter((other) => other.id !== picture.id);
  await db.remove("images", picture.id);
}

/** Adds pictures of an exported file; returns how many were not here. */
export async function addPictures(given: unknown[]): Promise<number> {
  await loadGallery();
  const held = new Set(gallery.value.map((picture) => picture.id));
  const added = given.map(readPicture).filter((picture) => picture !== null && !held.has(picture.id));
  for (const picture of added) await db.put("images", picture);
  await loadGallery();
  return added.length;
}
