import OpenAI from "openai";
import { ASK, FEW, KEY, MODEL, QUESTION, SCHEMA, TOOL, V1, argument, feature, pieces } from "./features.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const asked = { model: MODEL, messages: ASK, max_tokens: FEW };
const shape = { type: "json_schema", json_schema: { name: "capital", strict: true, schema: SCHEMA } };

await feature("models", async () => (await client.models.list()).data.map((model) => model.id));
await feature("chat", async () => (await client.chat.completions.create(asked)).choices[0].message.content);
await feature("stream", async () =>
  pieces(await client.chat.completions.create({ ...asked, stream: true }), (part) => part.choices[0].delta.content));
await feature("tools", async () => {
  const answer = await client.chat.completions.create({ ...asked, tools: [TOOL], tool_choice: "required" });
  return argument(answer.choices[0].message.tool_calls[0].function.arguments);
});
await feature("structured", async () =>
  argument((await client.chat.completions.create({ ...asked, response_format: shape })).choices[0].message.content));
await feature("responses", async () => {
  const events = client.responses.stream({ model: MODEL, input: QUESTION, max_output_tokens: FEW });
  return (await events.finalResponse()).output_text;
});
await feature("embeddings", async () =>
  (await client.embeddings.create({ model: MODEL, input: "The sea is calm." })).data[0].embedding.length);
await feature("images", async () => (await client.images.generate({ prompt: "a red square" })).data[0].b64_json);
