import { Ollama } from "ollama";
import { ASK, FEW, MODEL, SCHEMA, TOOL, URL_, argument, feature, pieces } from "./features.mjs";

const client = new Ollama({ host: URL_ });
const asked = { model: MODEL, messages: ASK, options: { num_predict: FEW } };

await feature("models", async () => (await client.list()).models.map((model) => model.name));
await feature("chat", async () => (await client.chat(asked)).message.content);
await feature("stream", async () => pieces(await client.chat({ ...asked, stream: true }), (part) => part.message.content));
await feature("tools", async () => (await client.chat({ ...asked, tools: [TOOL] })).message); // No tool_choice there.
await feature("structured", async () => argument((await client.chat({ ...asked, format: SCHEMA })).message.content));
await feature("embeddings", async () =>
  (await client.embed({ model: MODEL, input: "The sea is calm." })).embeddings[0].length);
