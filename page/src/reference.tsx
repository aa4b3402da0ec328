/** The API reference, from the server's own OpenAPI document. */
import { signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { apiKey, chatModels, getJson, urlOf } from "./api";
import { CodeBlock } from "./code";
import type { Json } from "./json";

interface Schema {
  $ref?: string;
  type?: string | string[];
  properties?: Record<string, Schema>;
  required?: string[];
  items?: Schema;
  anyOf?: Schema[];
  oneOf?: Schema[];
  allOf?: Schema[];
  enum?: Json[];
  const?: Json;
  description?: string;
  default?: Json;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  maxLength?: number;
  additionalProperties?: Schema | boolean;
  title?: string;
}
interface Operation {
  summary?: string;
  description?: string;
  parameters?: { name: string; in: string; required?: boolean; description?: string; schema?: Schema }[];
  requestBody?: { content: Record<string, { schema?: Schema }> };
  responses?: Record<string, { description?: string; content?: Record<string, { schema?: Schema }> }>;
}
interface Document {
  info: { title: string; version: string; summary?: string };
  paths: Record<string, Record<string, Operation>>;
  components?: { schemas?: Record<string, Schema> };
}

const reference = signal<Document | null>(null);
const trouble = signal("");

async function load(): Promise<void> {
  try {
    reference.value = await getJson<Document>("openapi.json");
    trouble.value = "";
  } catch (error) {
    trouble.value = error instanceof Error ? error.message : String(error);
  }
}

const nameOf = (ref: string) => ref.split("/").pop() ?? "";

function typeName(schema: Schema | undefined): string {
  if (!schema) return "any";
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const options = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (options) return [...new Set(options.map(typeName))].filter((name) => name !== "null").join(" | ");
  if (schema.type === "array") return `${typeName(schema.items)}[]`;
  if (schema.type === "object" && typeof schema.additionalProperties === "object") return `{name: ${typeName(schema.additionalProperties)}}`;
  return Array.isArray(schema.type) ? schema.type.join(" | ") : (schema.type ?? "any");
}

function limits(schema: Schema): string {
  const words: string[] = [];
  if (schema.minimum !== undefined) words.push(`≥ ${schema.minimum}`);
  if (schema.exclusiveMinimum !== undefined) words.push(`> ${schema.exclusiveMinimum}`);
  if (schema.maximum !== undefined) words.push(`≤ ${schema.maximum}`);
  if (schema.maxLength !== undefined) words.push(`at most ${schema.maxLength} characters`);
  if (schema.default !== undefined && schema.default !== null) words.push(`default ${JSON.stringify(schema.default)}`);
  return words.join(", ");
}

/** The names of the schemas that a schema speaks of. */
function referred(schema: Schema | undefined, found = new Set<string>()): Set<string> {
  if (!schema) return found;
  if (schema.$ref) found.add(nameOf(schema.$ref));
  for (const inner of [schema.items, ...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? [])]) referred(inner, found);
  if (typeof schema.additionalProperties === "object") referred(schema.additionalProperties, found);
  return found;
}

const MAX_DEPTH = 5;

function Fields({ document, schema, depth }: { document: Document; schema: Schema; depth: number }) {
  const properties = Object.entries(schema.properties ?? {});
  if (!properties.length) return <p class="muted small">{typeName(schema)}</p>;
  return (
    <ul class="fields">
      {properties.map(([name, field]) => (
        <li key={name}>
          <div class="field-line">
            <code class="field-name">{name}</code>
            <span class="type">{typeName(field)}</span>
            {schema.required?.includes(name) && <span class="required">required</span>}
          </div>
          {(field.description || limits(field)) && (
            <div class="muted small">{[field.description, limits(field)].filter(Boolean).join(" · ")}</div>
          )}
          {depth < MAX_DEPTH &&
            [...referred(field)]
              .map((ref) => [ref, document.components?.schemas?.[ref]] as const)
              .filter(([, inner]) => inner?.properties)
              .map(([ref, inner]) => <Nested key={ref} document={document} name={ref} schema={inner ?? {}} depth={depth + 1} />)}
        </li>
      ))}
    </ul>
  );
}

function Nested(props: { document: Document; name: string; schema: Schema; depth: number }) {
  const isOpen = useSignal(false);
  return (
    <details class="nested" onToggle={(event) => (isOpen.value = event.currentTarget.open)}>
      <summary>{props.name}</summary>
      {isOpen.value && <Fields document={props.document} schema={props.schema} depth={props.depth} />}
    </details>
  );
}

const BODIES: Record<string, Json> = {
  "/v1/chat/completions": { model: "MODEL", messages: [{ role: "user", content: "What is the capital of France?" }], max_tokens: 50 },
  "/v1/completions": { model: "MODEL", prompt: "The sea is", max_tokens: 20 },
  "/v1/messages": { model: "MODEL", max_tokens: 50, messages: [{ role: "user", content: "What is the capital of France?" }] },
  "/v1/responses": { model: "MODEL", input: "What is the capital of France?" },
  "/v1/embeddings": { model: "MODEL", input: ["The sea is calm."] },
  "/v1/images/generations": { prompt: "a red circle on a blue background", seed: 7 },
  "/tokenize": { prompt: "The sea is" },
  "/detokenize": { tokens: [504, 3426, 314] },
  "/v1/score": { model: "MODEL", text_1: "calm sea", text_2: ["still water", "rates"] },
  "/v1/rerank": { model: "MODEL", query: "calm sea", documents: ["still water", "rates"] },
};

function OperationView({ document, path, method, operation }: { document: Document; path: string; method: string; operation: Operation }) {
  const isOpen = useSignal(false);
  const [[contentType, body] = ["", undefined]] = Object.entries(operation.requestBody?.content ?? {});
  const resolve = (schema?: Schema) => (schema?.$ref ? document.components?.schemas?.[nameOf(schema.$ref)] : schema);
  const asked = resolve(body?.schema);
  const given = resolve(operation.responses?.["200"]?.content?.["application/json"]?.schema);
  const example = BODIES[path];
  const written = JSON.stringify(example ?? {}, null, 2).replaceAll('"MODEL"', JSON.stringify(chatModels()[0]?.id ?? "MODEL"));
  const key = apiKey.value ? ' -H "Authorization: Bearer $WEFT_API_KEY"' : "";
  return (
    <details class="operation card" id={`${method}${path}`} onToggle={(event) => (isOpen.value = event.currentTarget.open)}>
      <summary>
        <span class={`method ${method}`}>{method.toUpperCase()}</span>
        <code>{path}</code>
        {operation.description && <span class="muted small">{operation.description}</span>}
      </summary>
      {isOpen.value && (
        <div class="operation-body">
          {example !== undefined && <CodeBlock language="sh" code={`curl ${urlOf(path)}${key} --json '${written}'`} />}
          {method === "get" && <CodeBlock language="sh" code={`curl ${urlOf(path)}${key}`} />}
          {(operation.parameters?.length ?? 0) > 0 && (
            <>
              <h3>Parameters</h3>
              <ul class="fields">
                {operation.parameters?.map((parameter) => (
                  <li key={parameter.name}>
                    <div class="field-line">
                      <code class="field-name">{parameter.name}</code>
                      <span class="type">
                        {typeName(parameter.schema)}, in the {parameter.in}
                      </span>
                      {parameter.required && <span class="required">required</span>}
                    </div>
                  </li>
                ))}
              </ul>
            </>
          )}
          {asked && (
            <>
              <h3>
                Body <span class="muted small">{contentType}</span>
              </h3>
              <Fields document={document} schema={asked} depth={0} />
            </>
          )}
          {given && (
            <>
              <h3>Answer</h3>
              {given.properties ? <Fields document={document} schema={given} depth={0} /> : <p class="muted small">{typeName(given)}</p>}
            </>
          )}
        </div>
      )}
    </details>
  );
}

export function ReferenceView() {
  const sought = useSignal("");
  useEffect(() => void load(), []);
  const document = reference.value;
  const words = sought.value.trim().toLowerCase();
  const operations = Object.entries(document?.paths ?? {}).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })),
  );
  const found = operations.filter(({ path, method }) => `${method} ${path}`.toLowerCase().includes(words));
  return (
    <section class="panel reference" aria-labelledby="reference-title">
      <h1 id="reference-title">API reference</h1>
      <p class="muted">
        {document ? `${operations.length} operations of this server, version ${document.info.version}. ` : ""}
        The same as a document: <a href={urlOf("openapi.json")}>openapi.json</a>
      </p>
      {trouble.value && (
        <p class="problem" role="alert">
          {trouble.value}{" "}
          <button type="button" class="link" onClick={() => void load()}>
            Try again
          </button>
        </p>
      )}
      {document && (
        <>
          <label class="field search">
            <span>Find</span>
            <input type="search" placeholder="chat, images, models …" value={sought.value} onInput={(event) => (sought.value = event.currentTarget.value)} />
          </label>
          <div class="operations">
            {found.map(({ path, method, operation }) => (
              <OperationView key={method + path} document={document} path={path} method={method} operation={operation} />
            ))}
            {found.length === 0 && <p class="muted">Nothing here is called so.</p>}
          </div>
        </>
      )}
    </section>
  );
}
