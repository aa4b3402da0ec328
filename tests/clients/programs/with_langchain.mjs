import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { ASK, FEW, KEY, MODEL, SCHEMA, TOOL, V1, argument, feature, pieces } from "./features.mjs";

const place = { model: MODEL, apiKey: KEY, configuration: { baseURL: V1 }, maxRetries: 0 };
const model = new ChatOpenAI({ ...place, maxTokens: FEW });

await feature("chat", async () => (await model.invoke(ASK)).content);
await feature("stream", async () => pieces(await model.stream(ASK), (chunk) => chunk.content));
await feature("tools", async () =>
  argument((await model.bindTools([TOOL], { tool_choice: "any" }).invoke(ASK)).tool_calls[0].args));
await feature("structured", async () =>
  argument(await model.withStructuredOutput(SCHEMA, { name: "capital", method: "jsonSchema", strict: true }).invoke(ASK)));
await feature("responses", async () =>
  (await new ChatOpenAI({ ...place, maxTokens: FEW, useResponsesApi: true }).invoke(ASK)).content);
await feature("embeddings", async () => (await new OpenAIEmbeddings(place).embedQuery("The sea is calm.")).length);
