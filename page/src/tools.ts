/** Tools that the page runs itself, to show how calls go: a clock and a calculator. Nothing that a model writes is
 * executed: the calculator has a parser of its own. */
import type { ToolCall } from "./conversations";
import type { Json } from "./json";

export const EXAMPLES: Json = [
  {
    type: "function",
    function: {
      name: "calculate",
      description: "Compute an arithmetic expression with + - * / ^ and parentheses.",
      parameters: {
        type: "object",
        properties: { expression: { type: "string", pattern: "^[-+*/^(). 0-9]{1,40}$" } },
        required: ["expression"],
        additionalProperties: false,
      },
    },
  },
  {
    type: "function",
    function: {
      name: "current_time",
      description: "Tell the date and time in a time zone.",
      parameters: {
        type: "object",
        properties: { timezone: { type: "string", description: "As in Europe/Paris." } },
        required: ["timezone"],
        additionalProperties: false,
      },
    },
  },
];

/** Returns the result of a call of one of these tools; null: it is another tool, and the user gives the result. */
export function runTool(call: ToolCall): string | null {
  if (call.name !== "calculate" && call.name !== "current_time") return null;
  try {
    const given = JSON.parse(call.arguments) as Record<string, unknown>;
    if (call.name === "calculate") return JSON.stringify({ result: calculate(String(given.expression ?? "")) });
    return JSON.stringify({ time: timeIn(String(given.timezone ?? "UTC")) });
  } catch (error) {
    return JSON.stringify({ error: error instanceof Error ? error.message : String(error) });
  }
}

function timeIn(timeZone: string): string {
  return new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long", timeZone }).format(new Date());
}

const MAX_EXPRESSION = 500;
const MAX_DEPTH = 50;

export function calculate(expression: string): number {
  if (expression.length > MAX_EXPRESSION) throw new Error("The expression is too long.");
  const parts = expression.match(/\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|[-+*/^()]|\S/gi) ?? [];
  let at = 0;
  const take = () => parts[at++];
  const sum = (depth: number): number => {
    let value = product(depth);
    while (parts[at] === "+" || parts[at] === "-") value = take() === "+" ? value + product(depth) : value - product(depth);
    return value;
  };
  const product = (depth: number): number => {
    let value = power(depth);
    while (parts[at] === "*" || parts[at] === "/") value = take() === "*" ? value * power(depth) : value / power(depth);
    return value;
  };
  const power = (depth: number): number => {
    if (depth > MAX_DEPTH) throw new Error("The expression is nested too deeply.");
    if (parts[at] === "-") return take(), -power(depth + 1);
    const base = atom(depth);
    return parts[at] === "^" ? (take(), base ** power(depth + 1)) : base;
  };
  const atom = (depth: number): number => {
    const part = take();
    if (part === "(") {
      const value = sum(depth + 1);
      if (take() !== ")") throw new Error("A closing parenthesis is missing.");
      return value;
    }
    const value = Number(part);
    if (part === undefined || Number.isNaN(value)) throw new Error(`Not understood: ${part ?? "the end"}`);
    return value;
  };
  const value = sum(0);
  if (at < parts.length) throw new Error(`Not understood: ${parts[at]}`);
  return value;
}
