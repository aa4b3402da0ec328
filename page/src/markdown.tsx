/** Markdown as elements. What a model writes becomes text and a fixed set of elements, never HTML: there is no way from
 * it to a script, a style, an event handler, a frame, or a request to another server. */
import type { ComponentChild, VNode } from "preact";
import { useMemo } from "preact/hooks";
import { CodeBlock } from "./code";

const MAX_DEPTH = 6;
/** Of a paragraph; a longer one is shown as it is. */
const MAX_INLINE_CHARS = 20_000;

/** Returns the address of a link, if it is one that a page may lead to. */
export function safeLink(address: string): string | null {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function Link({ address, children }: { address: string; children: ComponentChild }) {
  const href = safeLink(address);
  if (href === null) return <span title={address}>{children}</span>;
  return (
    <a href={href} target="_blank" rel="noopener noreferrer nofollow" title={href}>
      {children}
    </a>
  );
}

const INLINE = new RegExp(
  [
    /\\([\\`*_{}[\]()#+\-.!~|>])/, // 1: escaped
    /(`{1,3})(?!`)([^\n]{1,1000}?)\2(?!`)/, // 2, 3: code
    /!?\[([^\]\n]{0,500})\]\(\s{0,3}<?([^\s)>]{1,2000})>?(?:\s{1,3}"[^"\n]{0,200}")?\s{0,3}\)/, // 4, 5: link or image
    /\*\*(?=\S)((?:[^*\n]|\*(?!\*)|\n(?!\n)){1,1000}?\S?)\*\*/, // 6: strong
    /(?<![\w\\])__(?=\S)([^_\n]{1,1000}?)__(?!\w)/, // 7: strong
    /\*(?=[^\s*])([^*\n]{1,1000}?)\*/, // 8: emphasis
    /(?<![\w\\])_(?=\S)([^_\n]{1,1000}?)_(?!\w)/, // 9: emphasis
    /~~(?=\S)([^~\n]{1,1000}?)~~/, // 10: struck
    /(https?:\/\/[^\s<>()\[\]"'`]{1,1000}[^\s<>()\[\]"'`.,;:!?])/, // 11: address
    /( {2,}\n|\\\n)/, // 12: line break
  ]
    .map((part) => part.source)
    .join("|"),
  "g",
);

function inline(text: string, depth = 0): ComponentChild[] {
  if (depth > MAX_DEPTH || text.length > MAX_INLINE_CHARS) return [text];
  const parts: ComponentChild[] = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > at) parts.push(text.slice(at, found.index));
    at = found.index + found[0].length;
    const [, escaped, , code, label, address, strong, strong2, soft, soft2, struck, url] = found;
    if (escaped !== undefined) parts.push(escaped);
    else if (code !== undefined) parts.push(<code>{code.trim()}</code>);
    else if (address !== undefined)
      parts.push(<Link address={address}>{found[0].startsWith("!") ? `🖼 ${label || address}` : inline(label ?? "", depth + 1)}</Link>);
    else if (strong !== undefined || strong2 !== undefined) parts.push(<strong>{inline(strong ?? strong2 ?? "", depth + 1)}</strong>);
    else if (soft !== undefined || soft2 !== undefined) parts.push(<em>{inline(soft ?? soft2 ?? "", depth + 1)}</em>);
    else if (struck !== undefined) parts.push(<del>{inline(struck, depth + 1)}</del>);
    else if (url !== undefined) parts.push(<Link address={url}>{url}</Link>);
    else parts.push(<br />);
  }
  if (at < text.length) parts.push(text.slice(at));
  return parts;
}

/** Returns the direction of a block's first letter. The attribute's value "auto" would not look into inner blocks. */
function directionOf(text: string): "ltr" | "rtl" | undefined {
  const [letter] = /\p{L}/u.exec(text.slice(0, 200)) ?? [];
  if (!letter) return undefined;
  return /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(letter) ? "rtl" : "ltr";
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,40})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const TASK = /^\[([ xX])\] /;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

function cells(line: string): string[] {
  return line
    .trim()
    .replace(/^\||\|$/g, "")
    .split(/(?<!\\)\|/)
    .slice(0, 40)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** Returns how a table's columns are aligned, from the line below its head. */
function alignments(line: string): string[] {
  return cells(line).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "centre" : "end") : "start"));
}

function isSpecial(line: string): boolean {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function indentOf(line: string): number {
  return line.length - line.trimStart().length;
}

/** Returns the elements of a text's blocks. */
function blocks(lines: string[], depth: number): VNode[] {
  const made: VNode[] = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at] ?? "";
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const fence = FENCE.exec(line);
    if (fence) {
      const mark = fence[1] ?? "```";
      let end = at + 1;
      while (end < lines.length && !(lines[end] ?? "").trim().startsWith(mark)) end += 1;
      made.push(<CodeBlock language={fence[2] ?? ""} code={lines.slice(at + 1, end).join("\n")} />);
      at = end + 1;
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      const level = Math.min(6, (heading[1]?.length ?? 1) + 2);
      const Tag = `h${level}` as "h3";
      made.push(<Tag dir={directionOf(heading[2] ?? "")}>{inline(heading[2] ?? "")}</Tag>);
      at += 1;
      continue;
    }
    if (RULE.test(line)) {
      made.push(<hr />);
      at += 1;
      continue;
    }
    if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const inner: string[] = [];
      for (; at < lines.length && QUOTE.test(lines[at] ?? ""); at += 1) inner.push(QUOTE.exec(lines[at] ?? "")?.[1] ?? "");
      made.push(<blockquote dir={directionOf(inner.join(" "))}>{blocks(inner, depth + 1)}</blockquote>);
      continue;
    }
    if (ITEM.test(line) && depth < MAX_DEPTH) {
      const [list, next] = listFrom(lines, at, depth);
      made.push(list);
      at = next;
      continue;
    }
    if (line.includes("|") && TABLE_LINE.test(lines[at + 1] ?? "") && cells(line).length > 1) {
      const head = cells(line);
      const aligned = alignments(lines[at + 1] ?? "");
      const rows: string[][] = [];
      for (at += 2; at < lines.length && (lines[at] ?? "").includes("|"); at += 1) rows.push(cells(lines[at] ?? ""));
      made.push(
        <div class="table" tabIndex={0} role="region" aria-label="Table">
          <table dir={directionOf(line)}>
            <thead>
              <tr>{head.map((cell, column) => <th class={aligned[column]}>{inline(cell)}</th>)}</tr>
            </thead>
            <tbody>{rows.map((row) => <tr>{head.map((_, column) => <td class={aligned[column]}>{inline(row[column] ?? "")}</td>)}</tr>)}</tbody>
          </table>
        </div>,
      );
      continue;
    }
    const paragraph = [line];
    for (at += 1; at < lines.length && (lines[at] ?? "").trim() && !isSpecial(lines[at] ?? ""); at += 1) paragraph.push(lines[at] ?? "");
    const written = paragraph.join("\n").trim();
    made.push(<p dir={directionOf(written)}>{inline(written)}</p>);
  }
  return made;
}

function listFrom(lines: string[], start: number, depth: number): [VNode, number] {
  const first = ITEM.exec(lines[start] ?? "");
  const indent = first?.[1]?.length ?? 0;
  const isOrdered = /\d/.test(first?.[2] ?? "");
  const items: VNode[] = [];
  let at = start;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at] ?? "");
    if (!found || /\d/.test(found[2] ?? "") !== isOrdered || (found[1]?.length ?? 0) < indent) break;
    const own = [(found[4] ?? "").replace(TASK, (_, mark: string) => (mark === " " ? "☐ " : "☑ "))];
    const inside = (found[1]?.length ?? 0) + (found[2]?.length ?? 1) + 1;
    for (at += 1; at < lines.length; at += 1) {
      const line = lines[at] ?? "";
      if (!line.trim()) {
        // An empty line belongs to the item if what follows it does.
        if (indentOf(lines[at + 1] ?? "") < inside) break;
        own.push("");
      } else if (indentOf(line) >= Math.min(inside, indent + 2)) own.push(line.slice(Math.min(inside, indentOf(line))));
      else if (isSpecial(line)) break;
      else own.push(line);
    }
    const content = blocks(own, depth + 1);
    const only = content[0];
    items.push(<li>{content.length >= 1 && only?.type === "p" ? [only.props.children, ...content.slice(1)] : content}</li>);
    while (at < lines.length && !(lines[at] ?? "").trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  const number = Number.parseInt(first?.[2] ?? "1", 10);
  const dir = directionOf(first?.[4] ?? "");
  return [isOrdered ? <ol dir={dir} start={number}>{items}</ol> : <ul dir={dir}>{items}</ul>, at];
}

/** Cuts a text where one block surely ends: at empty lines outside of fences and before lines without indentation. */
function sections(text: string): string[] {
  const found: string[] = [];
  let held: string[] = [];
  let fence = "";
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1] ?? "";
    const before = held.length ? (held[held.length - 1] ?? "") : "x";
    if (!fence && !before.trim() && line.trim() && !/^\s/.test(line) && !ITEM.test(line)) {
      found.push(held.join("\n"));
      held = [];
    }
    if (fence ? line.trim().startsWith(fence) : mark) fence = fence ? "" : mark;
    held.push(line);
  }
  if (held.length) found.push(held.join("\n"));
  return found;
}

function Section({ text }: { text: string }) {
  return useMemo(() => <>{blocks(text.split("\n"), 0)}</>, [text]);
}

/** Shows a text that may still grow: only its last section is read again. */
export function Markdown({ text }: { text: string }) {
  return useMemo(
    () => (
      <div class="markdown">
        {sections(text.replaceAll("\r\n", "\n")).map((section, at) => (
          <Section key={at} text={section} />
        ))}
      </div>
    ),
    [text],
  );
}
