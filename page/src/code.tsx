/** Code with colours: comments, strings, numbers, keywords and names of functions, in any of the common languages. */
import { useSignal } from "@preact/signals";
import type { ComponentChild } from "preact";
import { useMemo } from "preact/hooks";
import { Icon } from "./icons";
import { tell } from "./shell";

const KEYWORDS = new Set(
  (
    "and as assert async await break case catch class const continue def default del do elif else enum except export extends " +
    "extern false final finally fn for from func function global go if impl import in instanceof interface is lambda let " +
    "loop match mod module mut new nil None not null of or package pass private protected pub public raise return self " +
    "static struct super switch then this throw True False true try type typeof undefined union unsafe use using var void " +
    "where while with yield select insert update delete from join group by order limit create table values into set fi esac done echo local"
  ).split(" "),
);
const PART = new RegExp(
  [
    /(\/\*[\s\S]{0,4000}?\*\/|\/\/[^\n]{0,1000})/, // 1: comment
    /(#[^\n]{0,1000})/, // 2: comment of another family
    /("""[\s\S]{0,4000}?"""|'''[\s\S]{0,4000}?'''|"(?:[^"\\\n]|\\.){0,1000}"|'(?:[^'\\\n]|\\.){0,1000}'|`(?:[^`\\]|\\.){0,2000}`)/, // 3
    /(\b\d[\w.]{0,40})/, // 4: number
    /([A-Za-z_$][\w$]{0,100})(?=(\s{0,2}\()?)/, // 5, 6: name
    /(--[^\n]{0,1000})/, // 7: comment of SQL
  ]
    .map((part) => part.source)
    .join("|"),
  "g",
);
const MAX_CHARS = 20_000;
const HASH = /^(py|python|sh|bash|shell|zsh|yaml|yml|toml|ruby|rb|perl|r|make|makefile|dockerfile|console)$/i;
const PLAIN = /^(text|txt|plain|plaintext|output|md|markdown)$/i;

function coloured(code: string, language: string): ComponentChild[] {
  if (code.length > MAX_CHARS || PLAIN.test(language)) return [code];
  const parts: ComponentChild[] = [];
  let at = 0;
  const push = (kind: string, start: number, text: string) => {
    if (start > at) parts.push(code.slice(at, start));
    parts.push(<span class={`c-${kind}`}>{text}</span>);
    at = start + text.length;
  };
  for (const found of code.matchAll(PART)) {
    if (found.index < at) continue;
    const [, comment, hash, string, number, name, called, dashes] = found;
    if (comment !== undefined && !HASH.test(language)) push("comment", found.index, comment);
    else if (hash !== undefined && HASH.test(language)) push("comment", found.index, hash);
    else if (dashes !== undefined && /^(sql|lua|haskell)$/i.test(language)) push("comment", found.index, dashes);
    else if (string !== undefined) push("string", found.index, string);
    else if (number !== undefined) push("number", found.index, number);
    else if (name !== undefined && (KEYWORDS.has(name) || (/sql/i.test(language) && KEYWORDS.has(name.toLowerCase()))))
      push("keyword", found.index, name);
    else if (name !== undefined && called !== undefined) push("name", found.index, name);
  }
  if (at < code.length) parts.push(code.slice(at));
  return parts;
}

export async function copy(text: string, what: string): Promise<void> {
  try {
    // Over plain HTTP from another machine browsers have no clipboard but the older way.
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else if (!copyBySelection(text)) throw new Error();
    tell(`${what} is in the clipboard.`);
  } catch {
    tell("The browser does not let this page use the clipboard.");
  }
}

function copyBySelection(text: string): boolean {
  const field = document.createElement("textarea");
  field.value = text;
  // A dialog keeps the focus inside of it.
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  return isDone;
}

export function CopyButton({ text, what }: { text: string; what: string }) {
  const isDone = useSignal(false);
  return (
    <button
      type="button"
      class="icon-button small-button"
      aria-label={`Copy ${what.toLowerCase()}`}
      title={`Copy ${what.toLowerCase()}`}
      onClick={() => {
        void copy(text, what);
        isDone.value = true;
        setTimeout(() => (isDone.value = false), 1500);
      }}
    >
      <Icon name={isDone.value ? "check" : "copy"} />
    </button>
  );
}

export function CodeBlock({ code, language }: { code: string; language: string }) {
  const parts = useMemo(() => coloured(code, language), [code, language]);
  return (
    <div class="code" dir="ltr">
      <div class="code-head">
        <span>{language || "text"}</span>
        <CopyButton text={code} what="The code" />
      </div>
      <pre tabIndex={0} aria-label={`Code${language ? ` in ${language}` : ""}`}>
        <code>{parts}</code>
      </pre>
    </div>
  );
}
