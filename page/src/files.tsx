/** Files of chats and images: what one browser exports, another imports. */
import { useRef } from "preact/hooks";
import { addConversations, conversation, isRecord } from "./conversations";
import { addPictures, gallery } from "./gallery";
import { Icon } from "./icons";
import { tell } from "./shell";

/** Hands a file of this page's making to the browser. */
export function download(name: string, contents: Blob): void {
  const address = URL.createObjectURL(contents);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

function downloadJson(name: string, contents: object): void {
  download(name, new Blob([JSON.stringify({ weft: 1, ...contents }, null, 1)], { type: "application/json" }));
}

export function exportChats(ids: string[], name: string): void {
  downloadJson(name, { conversations: ids.map((id) => conversation(id)?.peek()).filter((item) => item !== undefined) });
}

export function exportGallery(): void {
  downloadJson("weft-images.json", { images: gallery.peek() });
}

const MAX_IMPORT_MIB = 256;
const counted = (count: number, what: string) => `${count} ${what}${count === 1 ? "" : "s"}`;

async function importFile(file: File): Promise<void> {
  if (file.size > MAX_IMPORT_MIB << 20) return tell(`Not imported: the file is larger than ${MAX_IMPORT_MIB} MiB.`);
  try {
    const given: unknown = JSON.parse(await file.text());
    if (!isRecord(given) || given.weft !== 1) throw new Error("The file was not exported by Weft.");
    const chats = Array.isArray(given.conversations) ? await addConversations(given.conversations) : 0;
    const images = Array.isArray(given.images) ? await addPictures(given.images) : 0;
    const parts = [chats || !images ? counted(chats, "chat") : "", images ? counted(images, "image") : ""].filter(Boolean);
    tell(`${parts.join(" and ")} ${chats + images === 1 ? "was" : "were"} imported.`);
  } catch (error) {
    tell(`Not imported: ${error instanceof Error ? error.message : error}`);
  }
}

export function ImportButton({ what }: { what: string }) {
  const file = useRef<HTMLInputElement>(null);
  return (
    <>
      <button type="button" onClick={() => file.current?.click()}>
        <Icon name="up" /> Import
      </button>
      <input
        ref={file}
        type="file"
        accept="application/json,.json"
        class="visually-hidden"
        tabIndex={-1}
        aria-label={`A file of exported ${what}`}
        onChange={(event) => {
          const [given] = event.currentTarget.files ?? [];
          event.currentTarget.value = "";
          if (given) void importFile(given);
        }}
      />
    </>
  );
}
