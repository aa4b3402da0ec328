/** What every view shares: the header with its tabs, the theme, messages that pass, dialogs, keyboard shortcuts. */
import { signal, useComputed } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { apiKey, isKeyRefused, keyWanted, loadModels, setKey, isKeyRemembered, serverTrouble, urlOf, version } from "./api";
import { Icon, type IconName, Logo } from "./icons";

export const route = signal(location.hash.slice(1) || "/chat");
addEventListener("hashchange", () => (route.value = location.hash.slice(1) || "/chat"));

export function go(path: string): void {
  location.hash = path;
}

type Theme = "light" | "dark";
const THEME = "weft.theme";
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const chosen = signal(localStorage.getItem(THEME) as Theme | null);
const system = signal<Theme>(systemDark.matches ? "dark" : "light");
systemDark.addEventListener("change", () => (system.value = systemDark.matches ? "dark" : "light"));
export const theme = () => chosen.value ?? system.value;

export function toggleTheme(): void {
  const next = theme() === "dark" ? "light" : "dark";
  chosen.value = next === system.value ? null : next;
  if (chosen.value) localStorage.setItem(THEME, chosen.value);
  else localStorage.removeItem(THEME);
}

interface NoticeAction {
  name: string;
  run: () => void;
}
const notice = signal("");
const noticeAction = signal<NoticeAction | null>(null);
const isNoticeShown = signal(false);
let hiding = 0;

/** Shows a short message for a few seconds; screen readers say it. */
export function tell(text: string, action: NoticeAction | null = null): void {
  notice.value = text;
  noticeAction.value = action;
  isNoticeShown.value = true;
  clearTimeout(hiding);
  hiding = setTimeout(() => (isNoticeShown.value = false), action ? 12_000 : 6000);
}

/** What screen readers hear of an answer that is being written. */
export const spoken = signal("");

export function IconButton(props: {
  icon: IconName;
  label: string;
  onClick: () => void;
  pressed?: boolean;
  expanded?: boolean;
  disabled?: boolean;
  class?: string;
}) {
  return (
    <button
      type="button"
      class={`icon-button ${props.class ?? ""}`}
      aria-label={props.label}
      title={props.label}
      aria-pressed={props.pressed}
      aria-expanded={props.expanded}
      disabled={props.disabled}
      onClick={props.onClick}
    >
      <Icon name={props.icon} />
    </button>
  );
}

export function Dialog(props: {
  isOpen: boolean;
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  class?: string;
}) {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = element.current;
    if (dialog && props.isOpen !== dialog.open) {
      if (props.isOpen) dialog.showModal();
      else dialog.close();
    }
  }, [props.isOpen]);
  return (
    <dialog
      ref={element}
      class={props.class}
      aria-label={props.title}
      // The event comes later: the dialog may be closed because it should be, or be open again.
      onClose={() => props.isOpen && !element.current?.open && props.onClose()}
      onClick={(event) => event.target === element.current && element.current?.close()}
    >
      {props.isOpen && (
        <div class="dialog-body">
          <header>
            <h2>{props.title}</h2>
            <IconButton icon="close" label="Close" onClick={() => element.current?.close()} />
          </header>
          {props.children}
        </div>
      )}
    </dialog>
  );
}

export const isHelpOpen = signal(false);

export interface Shortcut {
  keys: string;
  about: string;
  /** Absent: the element that has the focus handles the keys itself. */
  run?: () => void;
  matches?: (event: KeyboardEvent) => boolean;
}

const alt = (code: string) => (event: KeyboardEvent) =>
  event.altKey && !event.ctrlKey && !event.metaKey && event.code === code;

export const shortcuts: Shortcut[] = [
  { keys: "Enter", about: "Send the message" },
  { keys: "Shift+Enter", about: "Begin a new line" },
  { keys: "↑", about: "Edit the last message, in an empty field" },
  { keys: "Alt+1 … Alt+3", about: "Chat, images, live engine", run: () => undefined, matches: () => false },
  { keys: "Alt+T", about: "Dark or light", run: toggleTheme, matches: alt("KeyT") },
];

for (const [at, path] of ["/chat", "/images", "/live"].entries())
  shortcuts.push({ keys: "", about: "", run: () => go(path), matches: alt(`Digit${at + 1}`) });

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.closest("input, textarea, select, [contenteditable]") !== null;
}

shortcuts.push({
  keys: "?",
  about: "Show this help",
  run: () => (isHelpOpen.value = true),
  matches: (event) => event.key === "?" && !isTyping(event.target),
});

addEventListener("keydown", (event) => {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  const found = shortcuts.find((item) => item.run && item.matches?.(event));
  if (!found?.run) return;
  event.preventDefault();
  found.run();
});

function HelpDialog() {
  return (
    <Dialog isOpen={isHelpOpen.value} title="Keyboard" onClose={() => (isHelpOpen.value = false)}>
      <dl class="shortcuts">
        {shortcuts
          .filter((item) => item.keys)
          .map((item) => (
            <div key={item.keys}>
              <dt>
                <kbd>{item.keys}</kbd>
              </dt>
              <dd>{item.about}</dd>
            </div>
          ))}
      </dl>
    </Dialog>
  );
}

const CHECKING = "The server is asked whether it accepts the key…";

function KeyDialog() {
  const input = useRef<HTMLInputElement>(null);
  const remember = useRef<HTMLInputElement>(null);
  const why = keyWanted.value;
  return (
    <Dialog isOpen={why !== ""} title="API key" onClose={() => (keyWanted.value = "")}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          setKey(input.current?.value.trim() ?? "", remember.current?.checked ?? false);
          keyWanted.value = CHECKING;
          void loadModels().then(() => {
            if (keyWanted.value === CHECKING) keyWanted.value = "";
            if (!keyWanted.value && !serverTrouble.value) tell("The server accepts the key.");
          });
        }}
      >
        <p role="alert" class={isKeyRefused.value ? "error" : ""}>
          {why}
        </p>
        <label class="field">
          <span>Key</span>
          <input
            ref={input}
            type="password"
            autocomplete="off"
            spellcheck={false}
            autofocus
            defaultValue={apiKey.value}
            required
          />
        </label>
        <label class="check">
          <input ref={remember} type="checkbox" defaultChecked={isKeyRemembered.value} />
          <span>Remember it in this browser</span>
        </label>
        <p class="muted small">
          The key is sent to this server alone, in a header. Without the mark it is forgotten with this tab.
        </p>
        <div class="row end">
          {apiKey.value && (
            <button
              type="button"
              onClick={() => {
                setKey("", false);
                keyWanted.value = "";
                void loadModels();
              }}
            >
              Forget the key
            </button>
          )}
          <button type="submit" class="primary">
            Use this key
          </button>
        </div>
      </form>
    </Dialog>
  );
}

const TABS: { path: string; name: string; icon: IconName }[] = [
  { path: "/chat", name: "Chat", icon: "chat" },
  { path: "/images", name: "Images", icon: "image" },
  { path: "/live", name: "Live", icon: "pulse" },
];

export function Shell({ children }: { children: ComponentChildren }) {
  const tab = useComputed(() => `/${route.value.split("/")[1]}`);
  const isDocs = location.pathname.endsWith("/docs");
  document.documentElement.dataset.theme = theme();
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href={urlOf("")} aria-label="Weft, home">
          <Logo />
          <span>Weft</span>
        </a>
        <nav aria-label="Views">
          {TABS.map(({ path, name, icon }) => (
            <a
              key={path}
              href={isDocs ? urlOf("") + "#" + path : "#" + path}
              aria-current={!isDocs && tab.value === path ? "page" : undefined}
            >
              <Icon name={icon} />
              <span>{name}</span>
            </a>
          ))}
          <a href={urlOf("docs")} aria-current={isDocs ? "page" : undefined}>
            <Icon name="book" />
            <span>API</span>
          </a>
        </nav>
        <div class="top-actions">
          {version.value && <span class="version muted small">{version.value}</span>}
          <IconButton
            icon="key"
            label="API key"
            onClick={() => (keyWanted.value = apiKey.value ? "This key is sent with every request." : "A key, if the server asks for one.")}
          />
          <IconButton icon="help" label="Keyboard shortcuts" class="not-phone" onClick={() => (isHelpOpen.value = true)} />
          <IconButton
            icon={theme() === "dark" ? "sun" : "moon"}
            label={theme() === "dark" ? "Light theme" : "Dark theme"}
            onClick={toggleTheme}
          />
        </div>
      </header>
      {serverTrouble.value && !keyWanted.value && (
        <div class="banner" role="alert">
          <span>{serverTrouble.value}</span>
          <button type="button" onClick={() => void loadModels()}>
            Try again
          </button>
        </div>
      )}
      <main id="main" tabIndex={-1}>
        {children}
      </main>
      <div class="toast" role="status" data-shown={isNoticeShown.value}>
        {notice.value}
        {isNoticeShown.value && noticeAction.value && (
          <button
            type="button"
            onClick={() => {
              noticeAction.peek()?.run();
              isNoticeShown.value = false;
            }}
          >
            {noticeAction.value.name}
          </button>
        )}
      </div>
      <div class="visually-hidden" aria-live="polite" id="spoken">
        {spoken.value}
      </div>
      <HelpDialog />
      <KeyDialog />
    </>
  );
}
