export type Json = string | number | boolean | null | Json[] | { [name: string]: Json };

/** Parses JSON that a user wrote. Returns undefined for nothing but white space; throws with the reason for no JSON. */
export function parseJson(text: string): Json | undefined {
  return text.trim() ? (JSON.parse(text) as Json) : undefined;
}

export function problemOf(text: string): string {
  try {
    parseJson(text);
    return "";
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

/** Writes a JSON value as Python's literal. */
export function toPython(value: Json, indent = ""): string {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value === "number") return String(value);
  const deeper = `${indent}    `;
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((item) => deeper + toPython(item, deeper)).join(",\n")},\n${indent}]`;
  }
  const entries = Object.entries(value);
  if (!entries.length) return "{}";
  return `{\n${entries.map(([name, item]) => `${deeper}${JSON.stringify(name)}: ${toPython(item, deeper)}`).join(",\n")},\n${indent}}`;
}
