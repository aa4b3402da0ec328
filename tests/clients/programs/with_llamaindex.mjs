import { OpenAI, OpenAIEmbedding } from "@llamaindex/openai";
import { ASK, FEW, KEY, MODEL, V1, feature, pieces } from "./features.mjs";

const place = { model: MODEL, apiKey: KEY, baseURL: V1, additionalSessionOptions: { baseURL: V1 } };
const model = new OpenAI({ ...place, maxTokens: FEW });

await feature("chat", async () => (await model.chat({ messages: ASK })).message.content);
await feature("stream", async () => pieces(await model.chat({ messages: ASK, stream: true }), (part) => part.delta));
await feature("embeddings", async () => (await new OpenAIEmbedding(place).getTextEmbedding("The sea is calm.")).length);
