import { setTimeout } from "node:timers/promises";
import Anthropic from "@anthropic-ai/sdk";
import { ABOUT, ASK, FEW, KEY, MODEL, SCHEMA, URL_, argument, feature, pieces } from "./features.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: KEY, maxRetries: 0 });
const asked = { model: MODEL, messages: ASK, max_tokens: FEW };
const tool = { name: "weather", description: ABOUT, input_schema: SCHEMA };

await feature("models", async () => (await client.models.list()).data.map((model) => model.display_name));
await feature("chat", async () => (await client.messages.create(asked)).content[0].text);
await feature("stream", async () => pieces(client.messages.stream(asked), (event) => event.delta?.text));
await feature("tools", async () => {
  const answer = await client.messages.create({ ...asked, tools: [tool], tool_choice: { type: "any" } });
  return argument(answer.content[0].input);
});
await feature("count_tokens", async () =>
  (await client.messages.countTokens({ model: MODEL, messages: ASK })).input_tokens);
await feature("batches", async () => {
  let batch = await client.messages.batches.create({ requests: [{ custom_id: "1", params: asked }] });
  while (batch.processing_status !== "ended") {
    await setTimeout(200);
    batch = await client.messages.batches.retrieve(batch.id);
  }
  for await (const answer of await client.messages.batches.results(batch.id)) return answer.result.message.content[0].text;
});
