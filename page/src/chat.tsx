/** The chat: conversations on the left, one or two lanes of messages, the field to write in, settings on the right. */
import { signal, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { chatModels, loadModels, serverTrouble } from "./api";
import { CopyButton } from "./code";
import {
  add,
  begin,
  conversation,
  type Conversation,
  current,
  currentId,
  forget,
  isEmpty,
  type Lane,
  loadConversations,
  type Message,
  order,
  pathTo,
  rename,
  restore,
  setCompared,
  show,
  siblings,
  type Stats,
  storeTrouble,
  type ToolCall,
  updateSettings,
} from "./conversations";
import { exportChats, ImportButton } from "./files";
import { answer, giveResult, isWriting, messagesOf, modelOf, stop } from "./generate";
import { Icon } from "./icons";
import { Markdown } from "./markdown";
import { ModelSelect, SettingsPanel } from "./settings";
import { go, IconButton, route, shortcuts, tell } from "./shell";
import { shownRequest } from "./snippets";
import { TokenView } from "./tokens";

const isWide = matchMedia("(min-width: 1100px)");
const isSidebarOpen = signal(isWide.matches);
const isSettingsOpen = signal(isWide.matches);
const settingsLane = signal(0);
const editing = signal("");
const composer = { element: null as HTMLTextAreaElement | null };

begin();

function newChat(): void {
  begin();
  go("/chat");
  if (!isWide.matches) isSidebarOpen.value = false;
  composer.element?.focus();
}

function open(id: string): void {
  go(`/chat/${id}`);
  currentId.value = id;
  if (!isWide.matches) isSidebarOpen.value = false;
}

function toggleCompare(): void {
  const item = current().peek();
  setCompared(item.id, item.lanes.length === 1);
  settingsLane.value = 0;
}

function regenerateLast(): void {
  const item = current().peek();
  item.lanes.forEach((lane, at) => {
    const path = pathTo(item, lane.head);
    const last = path.findLast((message) => message.role === "assistant");
    if (last?.parent && !isWriting(item)) void answer(item.id, at, last.parent);
  });
}

const isChat = () => route.peek().startsWith("/chat") && !location.pathname.endsWith("/docs");
const onAlt = (code: string) => (event: KeyboardEvent) => isChat() && event.altKey && !event.ctrlKey && event.code === code;

shortcuts.push(
  { keys: "Escape", about: "Stop the answer", run: () => stop(current().peek()), matches: (event) => isChat() && event.key === "Escape" && isWriting(current().peek()) },
  { keys: "/", about: "Write a message", run: () => composer.element?.focus(), matches: (event) => isChat() && event.key === "/" && !(event.target as HTMLElement).closest?.("input, textarea, select") },
  { keys: "Alt+N", about: "New chat", run: newChat, matches: onAlt("KeyN") },
  { keys: "Alt+R", about: "Answer again", run: regenerateLast, matches: onAlt("KeyR") },
  { keys: "Alt+C", about: "Two side by side, or one", run: toggleCompare, matches: onAlt("KeyC") },
  { keys: "Alt+S", about: "Settings", run: () => (isSettingsOpen.value = !isSettingsOpen.value), matches: onAlt("KeyS") },
  { keys: "Alt+H", about: "List of chats", run: () => (isSidebarOpen.value = !isSidebarOpen.value), matches: onAlt("KeyH") },
);

function Sidebar() {
  return (
    <aside class="sidebar" aria-label="Chats" hidden={!isSidebarOpen.value}>
      <button type="button" class="new-chat" onClick={newChat}>
        <Icon name="plus" /> New chat
      </button>
      <nav aria-label="Chats">
        {storeTrouble.value && (
          <p class="problem small" role="alert">
            {storeTrouble.value}
          </p>
        )}
        {order.value.length === 0 && <p class="muted small empty-list">Chats stay in this browser. They appear here.</p>}
        <ul>
          {order.value.map((id) => (
            <SidebarItem key={id} id={id} />
          ))}
        </ul>
      </nav>
      <footer class="row">
        <button type="button" disabled={!order.value.length} onClick={() => exportChats(order.value, "weft-chats.json")}>
          <Icon name="down" /> Export
        </button>
        <ImportButton what="chats" />
      </footer>
    </aside>
  );
}

function SidebarItem({ id }: { id: string }) {
  const isRenamed = useSignal(false);
  const title = useRef<HTMLInputElement>(null);
  useEffect(() => title.current?.select(), [isRenamed.value]);
  const item = conversation(id)?.value;
  if (!item) return null;
  const isCurrent = currentId.value === id;
  if (isRenamed.value)
    return (
      <li>
        <form
          onSubmit={(event) => {
            event.preventDefault();
            rename(id, String(new FormData(event.currentTarget).get("title") ?? "").trim() || item.title);
            isRenamed.value = false;
          }}
        >
          <input ref={title} name="title" aria-label="Title" defaultValue={item.title} onBlur={(event) => event.currentTarget.form?.requestSubmit()} />
        </form>
      </li>
    );
  return (
    <li class={isCurrent ? "current" : ""}>
      <a href={`#/chat/${id}`} aria-current={isCurrent ? "true" : undefined} onClick={() => open(id)} title={item.title} dir="auto">
        {isWriting(item) && <span class="dot" aria-label="writing" />}
        {item.title || "Untitled"}
      </a>
      <span class="item-actions">
        <IconButton icon="edit" label={`Rename ${item.title}`} onClick={() => (isRenamed.value = true)} />
        <IconButton icon="down" label={`Export ${item.title}`} onClick={() => exportChats([id], "weft-chat.json")} />
        <IconButton
          icon="trash"
          label={`Delete ${item.title}`}
          onClick={() => {
            stop(item);
            void forget(id).then(() => tell("The chat is deleted.", { name: "Undo", run: () => void restore(item).then(() => go(`/chat/${id}`)) }));
          }}
        />
      </span>
    </li>
  );
}

function ms(value: number): string {
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
}

function StatsLine({ stats, finish, model }: { stats: Stats; finish?: string; model?: string }) {
  const parts: [string, string, string][] = [];
  if (model) parts.push(["", model, "Model"]);
  if (stats.ttftMs !== undefined) parts.push(["TTFT", ms(stats.ttftMs), "Time to first token, as the server measured it"]);
  if (stats.interTokenMs) parts.push(["", `${(1000 / stats.interTokenMs).toFixed(1)} tok/s`, "After the first token"]);
  if (stats.completionTokens !== undefined) parts.push(["", `${stats.completionTokens} tokens`, "Of the answer"]);
  if (stats.promptTokens !== undefined)
    parts.push(["", `${stats.promptTokens} prompt${stats.cachedTokens ? ` (${stats.cachedTokens} cached)` : ""}`, "Tokens of the prompt, and how many of them the prefix cache had"]);
  if (stats.totalMs !== undefined) parts.push(["", ms(stats.totalMs), `In all${stats.queueMs !== undefined ? `; ${ms(stats.queueMs)} in the queue` : ""}`]);
  if (finish && finish !== "stop") parts.push(["", FINISHES[finish] ?? finish, "How it ended"]);
  return (
    <div class="stats num">
      {parts.map(([label, value, about]) => (
        <span key={about} title={about}>
          {label && <abbr>{label}</abbr>} {value}
        </span>
      ))}
    </div>
  );
}

const FINISHES: Record<string, string> = { length: "cut at max tokens", stopped: "stopped", tool_calls: "tool call" };

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function ToolCallCard(props: { item: Conversation; lane: number; message: Message; call: ToolCall; result?: Message }) {
  const { item, lane, message, call, result } = props;
  const draft = useSignal("");
  const isCut = message.finish === "length" && call === message.calls?.at(-1);
  const state = message.isPending ? "is being called…" : result ? "called" : isCut ? "was cut at max tokens" : "waits for its result";
  return (
    <div class="tool-call" role="group" aria-label={`Call of the tool ${call.name}`}>
      <div class="row">
        <Icon name="tool" />
        <strong class="mono">{call.name}</strong>
        <span class="muted small">{state}</span>
      </div>
      <pre class="mono" aria-label="Arguments">{pretty(call.arguments) || "…"}</pre>
      {result && (
        <>
          <div class="muted small">Result</div>
          <pre class="mono" aria-label="Result">{pretty(result.content)}</pre>
        </>
      )}
      {!result && !message.isPending && !isCut && (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            void giveResult(item.id, lane, message, call, draft.value);
          }}
        >
          <textarea
            class="mono"
            rows={2}
            aria-label={`Result of ${call.name}`}
            placeholder="The tool's result, as the model will read it"
            value={draft.value}
            onInput={(event) => (draft.value = event.currentTarget.value)}
          />
          <div class="row end">
            <button type="submit" class="primary">
              Give the result
            </button>
          </div>
        </form>
      )}
    </div>
  );
}

function Editor({ item, lane, message }: { item: Conversation; lane: number; message: Message }) {
  const draft = useSignal(message.content);
  const field = useRef<HTMLTextAreaElement>(null);
  const isUser = message.role === "user";
  const done = () => {
    editing.value = "";
    composer.element?.focus();
  };
  useEffect(() => field.current?.focus(), []);
  const submit = () => {
    done();
    const text = draft.value;
    if (!text.trim()) return;
    const made = add(item.id, lane, { parent: message.parent, role: message.role, content: text, model: message.model });
    if (isUser) void answer(item.id, lane, made.id);
  };
  return (
    <form
      class="editor"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      <textarea
        ref={field}
        aria-label={isUser ? "Your message" : "The answer"}
        dir="auto"
        rows={Math.min(14, draft.value.split("\n").length + 1)}
        value={draft.value}
        onInput={(event) => (draft.value = event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") done();
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing && isUser) {
            event.preventDefault();
            submit();
          }
        }}
      />
      <div class="row end">
        <span class="muted small grow">{isUser ? "This begins a new branch." : "The edited answer is a branch of its own."}</span>
        <button type="button" onClick={done}>
          Cancel
        </button>
        <button type="submit" class="primary">
          {isUser ? "Send" : "Keep"}
        </button>
      </div>
    </form>
  );
}

function Branches({ item, lane, message }: { item: Conversation; lane: number; message: Message }) {
  const others = siblings(item, message);
  if (others.length < 2) return null;
  const at = others.findIndex((other) => other.id === message.id);
  const step = (by: number) => {
    const next = others[at + by];
    if (next) show(item.id, lane, next.id);
  };
  return (
    <span class="branches" role="group" aria-label="Branches">
      <IconButton icon="left" label="Previous branch" disabled={at === 0} onClick={() => step(-1)} />
      <span class="num small">
        {at + 1}/{others.length}
      </span>
      <IconButton icon="right" label="Next branch" disabled={at === others.length - 1} onClick={() => step(1)} />
    </span>
  );
}

function MessageView(props: { item: Conversation; lane: number; message: Message; path: Message[] }) {
  const { item, lane, message, path } = props;
  const isTokenView = useSignal(false);
  const editKey = `${lane}-${message.id}`;
  const isBusy = isWriting(item);
  if (message.role === "tool") return null;
  if (editing.value === editKey)
    return (
      <article class={`message ${message.role}`}>
        <Editor item={item} lane={lane} message={message} />
      </article>
    );
  const isAnswer = message.role === "assistant";
  const isJson = isAnswer && /^\s*[{[]/.test(message.content) && message.request?.response_format !== undefined;
  return (
    <article class={`message ${message.role}`} aria-label={isAnswer ? "Answer" : "Your message"} aria-busy={message.isPending}>
      <div class="bubble">
        {message.reasoning && (
          <details class="reasoning" open={message.isPending && !message.content}>
            <summary>Thinking</summary>
            <Markdown text={message.reasoning} />
          </details>
        )}
        {isAnswer ? (
          isTokenView.value && message.tokens ? (
            <TokenView tokens={message.tokens} />
          ) : isJson ? (
            <Markdown text={`\`\`\`json\n${pretty(message.content)}\n\`\`\``} />
          ) : (
            message.content && <Markdown text={message.content} />
          )
        ) : (
          <div class="plain" dir="auto">{message.content}</div>
        )}
        {message.calls?.map((call) => (
          <ToolCallCard
            key={call.id}
            item={item}
            lane={lane}
            message={message}
            call={call}
            result={path.find((other) => other.role === "tool" && other.callId === call.id)}
          />
        ))}
        {message.isPending && !message.content && !message.calls && !message.reasoning && (
          <span class="waiting" role="img" aria-label="Waiting for the first token">
            <i />
            <i />
            <i />
          </span>
        )}
        {message.error && (
          <p class="problem" role="alert">
            {message.error}
          </p>
        )}
      </div>
      <div class="message-foot">
        {isAnswer && message.stats && <StatsLine stats={message.stats} finish={message.finish} model={item.lanes.length > 1 ? message.model : undefined} />}
        {!message.isPending && (
          <div class="message-actions">
            <Branches item={item} lane={lane} message={message} />
            <CopyButton text={message.content} what={isAnswer ? "The answer" : "The message"} />
            {isAnswer && message.parent && (
              <IconButton icon="again" label="Answer again" disabled={isBusy} onClick={() => message.parent && void answer(item.id, lane, message.parent)} />
            )}
            <IconButton icon="edit" label={isAnswer ? "Edit the answer" : "Edit the message"} disabled={isBusy} onClick={() => (editing.value = editKey)} />
            {isAnswer && (
              <IconButton
                icon="tokens"
                label="Tokens and their probabilities"
                pressed={isTokenView.value && message.tokens !== undefined}
                onClick={() => {
                  if (message.tokens) isTokenView.value = !isTokenView.value;
                  else if (message.parent && !isBusy) {
                    updateSettings(lane, { hasTokens: true });
                    tell("This answer came without probabilities: it is answered again with them.");
                    void answer(item.id, lane, message.parent);
                  }
                }}
              />
            )}
            {isAnswer && message.request && (
              <IconButton
                icon="code"
                label="Copy as curl or Python"
                onClick={() => {
                  const system = item.lanes[lane]?.settings.system ?? "";
                  const before = path.slice(0, path.indexOf(message));
                  shownRequest.value = { path: "v1/chat/completions", body: { ...message.request, messages: messagesOf(system, before) } };
                }}
              />
            )}
          </div>
        )}
      </div>
    </article>
  );
}

const STARTERS = [
  "Explain how a prefix cache speeds up a chat, in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Plan a weekend in Lisbon as a table.",
];

function Welcome() {
  const cards = chatModels();
  return (
    <div class="welcome">
      <h1>What would you like to know?</h1>
      <p class="muted">
        {cards.length
          ? `${cards.map((card) => card.id).slice(0, 4).join(", ")} ${cards.length === 1 ? "is" : "are"} ready${cards[0]?.max_model_len ? `, with ${cards[0].max_model_len.toLocaleString("en")} tokens of context` : ""}.`
          : serverTrouble.value
            ? "There is no model to talk to yet."
            : "Looking for models…"}
      </p>
      {cards.length > 0 && (
        <div class="starters">
          {STARTERS.map((text) => (
            <button key={text} type="button" onClick={() => send(text)}>
              {text}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}

function LaneView({ item, lane, at }: { item: Conversation; lane: Lane; at: number }) {
  const path = pathTo(item, lane.head);
  const box = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  const last = path[path.length - 1];
  useLayoutEffect(() => {
    if (isAtEnd.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [last, item.id]);
  const name = item.lanes.length > 1 ? (at === 0 ? "A" : "B") : "";
  return (
    <section class="lane" aria-label={name ? `Side ${name}` : "Conversation"}>
      {name && (
        <header class="lane-head">
          <span class="lane-name">{name}</span>
          <ModelSelect settings={lane.settings} lane={at} label={`Model of side ${name}`} />
          <button
            type="button"
            onClick={() => {
              settingsLane.value = at;
              isSettingsOpen.value = true;
            }}
          >
            <Icon name="sliders" /> Settings<span class="visually-hidden"> of side {name}</span>
          </button>
        </header>
      )}
      <div
        class="messages"
        ref={box}
        tabIndex={0}
        role="log"
        aria-live="off"
        aria-label="Messages"
        onScroll={(event) => {
          const held = event.currentTarget;
          isAtEnd.current = held.scrollHeight - held.scrollTop - held.clientHeight < 60;
        }}
      >
        {path.length === 0 ? <Welcome /> : path.map((message) => <MessageView key={message.id} item={item} lane={at} message={message} path={path} />)}
      </div>
    </section>
  );
}

function send(text: string): void {
  const item = current().peek();
  if (!text.trim() || isWriting(item)) return;
  item.lanes.forEach((lane, at) => {
    const made = add(item.id, at, { parent: lane.head, role: "user", content: text });
    void answer(item.id, at, made.id);
  });
  if (!route.peek().startsWith(`/chat/${item.id}`)) history.replaceState(null, "", `#/chat/${item.id}`);
}

function Composer({ item }: { item: Conversation }) {
  const draft = useSignal("");
  const field = useRef<HTMLTextAreaElement>(null);
  const isBusy = isWriting(item);
  useEffect(() => {
    composer.element = field.current;
    if (isWide.matches) field.current?.focus();
  }, [item.id]);
  const grow = () => {
    const held = field.current;
    if (!held || CSS.supports("field-sizing", "content")) return;
    held.style.height = "auto";
    held.style.height = `${held.scrollHeight}px`;
  };
  const submit = () => {
    if (isBusy || !draft.value.trim()) return;
    send(draft.value);
    draft.value = "";
    queueMicrotask(grow);
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      <div class="composer-box">
        <textarea
          ref={field}
          rows={1}
          aria-label="Message"
          dir="auto"
          placeholder={isEmpty(item) ? "Write a message" : "Write a reply"}
          value={draft.value}
          onInput={(event) => {
            draft.value = event.currentTarget.value;
            grow();
          }}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
              event.preventDefault();
              submit();
            }
            if (event.key === "ArrowUp" && draft.value === "") {
              const last = pathTo(item, item.lanes[0]?.head ?? null).findLast((message) => message.role === "user");
              if (last && !isBusy) {
                event.preventDefault();
                editing.value = `0-${last.id}`;
              }
            }
          }}
        />
        {isBusy ? (
          <button type="button" class="send stop" aria-label="Stop the answer" title="Stop (Escape)" onClick={() => stop(item)}>
            <Icon name="stop" />
          </button>
        ) : (
          <button type="submit" class="send primary" aria-label="Send" title="Send (Enter)" disabled={!draft.value.trim()}>
            <Icon name="send" />
          </button>
        )}
      </div>
    </form>
  );
}

function SettingsDrawer({ item }: { item: Conversation }) {
  const at = Math.min(settingsLane.value, item.lanes.length - 1);
  const lane = item.lanes[at];
  return (
    <aside class="drawer" aria-label="Settings" hidden={!isSettingsOpen.value}>
      <header class="drawer-head">
        <h2>Settings</h2>
        {item.lanes.length > 1 && (
          <div class="segments" role="radiogroup" aria-label="Side">
            {item.lanes.map((_, number) => (
              <label key={number}>
                <input type="radio" name="lane" checked={number === at} onChange={() => (settingsLane.value = number)} />
                <span>{number === 0 ? "A" : "B"}</span>
              </label>
            ))}
          </div>
        )}
        <IconButton icon="close" label="Close the settings" onClick={() => (isSettingsOpen.value = false)} />
      </header>
      {lane && <SettingsPanel key={`${item.id}-${at}`} settings={lane.settings} lane={at} />}
    </aside>
  );
}

export function ChatView() {
  const item = current().value;
  const isCompared = item.lanes.length > 1;
  const [, , asked] = route.value.split("/");
  useEffect(() => {
    void loadConversations().then(() => {
      if (asked && conversation(asked)) currentId.value = asked;
    });
  }, []);
  useEffect(() => {
    if (asked && conversation(asked) && asked !== currentId.peek()) currentId.value = asked;
  }, [asked]);
  const first = item.lanes[0];
  return (
    <div class={`chat ${isCompared ? "compared" : ""}`}>
      <Sidebar />
      {(isSidebarOpen.value || isSettingsOpen.value) && (
        <button
          type="button"
          class="shade"
          aria-label="Close"
          onClick={() => {
            isSidebarOpen.value = false;
            isSettingsOpen.value = false;
          }}
        />
      )}
      <div class="chat-main">
        <div class="toolbar">
          <IconButton icon="menu" label="List of chats" expanded={isSidebarOpen.value} onClick={() => (isSidebarOpen.value = !isSidebarOpen.value)} />
          {first && !isCompared && <ModelSelect settings={first.settings} lane={0} label="Model" />}
          {first && !isCompared && <SettingsSummary lane={first} />}
          <span class="grow" />
          <IconButton icon="plus" label="New chat" onClick={newChat} />
          <IconButton icon="columns" label="Side by side" pressed={isCompared} onClick={toggleCompare} />
          <IconButton icon="sliders" label="Settings" expanded={isSettingsOpen.value} onClick={() => (isSettingsOpen.value = !isSettingsOpen.value)} />
        </div>
        <div class="lanes">
          {item.lanes.map((lane, at) => (
            <LaneView key={`${item.id}-${at}`} item={item} lane={lane} at={at} />
          ))}
        </div>
        {serverTrouble.value && chatModels().length === 0 ? (
          <div class="composer">
            <button type="button" onClick={() => void loadModels()}>
              Look for models again
            </button>
          </div>
        ) : (
          <Composer item={item} />
        )}
      </div>
      <SettingsDrawer item={item} />
    </div>
  );
}

/** The settings that are not the model's own, in a few words. */
function SettingsSummary({ lane }: { lane: Lane }) {
  const { settings } = lane;
  const words = Object.entries(settings.params)
    .filter(([, value]) => typeof value === "number")
    .slice(0, 3)
    .map(([name, value]) => `${name} ${value}`);
  if (settings.system.trim()) words.unshift("system prompt");
  if (settings.format !== "text") words.push(settings.format.replace("_", " "));
  if (settings.tools.trim()) words.push("tools");
  const name = modelOf(settings);
  return words.length ? (
    <span class="muted small summary not-phone" title={`${name}: ${words.join(", ")}`}>
      {words.join(" · ")}
    </span>
  ) : null;
}
