import * as ai from "ai";
import { ABOUT, FEW, KEY, MODEL, QUESTION, SCHEMA, V1, argument, feature, pieces } from "./features.mjs";

const [protocol] = process.argv.slice(2);
const settings = { name: "weft", baseURL: V1, apiKey: KEY, supportsStructuredOutputs: true };
const made = {
  openai: async () => (await import("@ai-sdk/openai")).createOpenAI(settings),
  compatible: async () => (await import("@ai-sdk/openai-compatible")).createOpenAICompatible(settings),
  anthropic: async () => (await import("@ai-sdk/anthropic")).createAnthropic(settings),
};
const provider = await made[protocol]();
const model = protocol === "openai" ? provider.chat(MODEL) : provider(MODEL);
const asked = { model, prompt: QUESTION, maxOutputTokens: FEW, maxRetries: 0 };
const schema = ai.jsonSchema(SCHEMA);
const tools = { weather: ai.tool({ description: ABOUT, inputSchema: schema }) };

await feature("chat", async () => (await ai.generateText(asked)).text);
await feature("stream", async () => {
  let failure;
  const text = await pieces(ai.streamText({ ...asked, onError: ({ error }) => { failure = error; } }).textStream)
    .catch((error) => { throw failure ?? error; });
  return text;
});
await feature("tools", async () =>
  argument((await ai.generateText({ ...asked, tools, toolChoice: "required" })).toolCalls[0].input));
await feature("structured", async () => {
  const { output } = await ai.generateText({ ...asked, output: ai.Output.object({ schema }) });
  return argument(output);
});
if (protocol === "openai") {
  await feature("responses", async () =>
    (await ai.generateText({ ...asked, model: provider.responses(MODEL) })).text);
}
if (protocol !== "anthropic") {
  const embedder = provider.embeddingModel ?? provider.textEmbeddingModel;
  await feature("embeddings", async () =>
    (await ai.embed({ model: embedder(MODEL), value: "The sea is calm.", maxRetries: 0 })).embedding.length);
}
