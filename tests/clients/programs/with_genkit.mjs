import { openAICompatible } from "@genkit-ai/compat-oai";
import { genkit, z } from "genkit";
import { ABOUT, FEW, KEY, MODEL, QUESTION, V1, feature, pieces } from "./features.mjs";

const ai = genkit({ plugins: [openAICompatible({ name: "weft", apiKey: KEY, baseURL: V1 })] });
const Capital = z.object({ city: z.enum(["Berlin", "Paris"]) });
const asked = { model: `weft/${MODEL}`, prompt: QUESTION, config: { max_tokens: FEW } };
let called;
const weather = ai.defineTool({ name: "weather", description: ABOUT, inputSchema: Capital }, async ({ city }) => {
  called = city;
  return "It rains.";
});

await feature("chat", async () => (await ai.generate(asked)).text);
await feature("stream", async () => pieces(ai.generateStream(asked).stream, (chunk) => chunk.text));
await feature("tools", async () => {
  const answer = await ai.generate({ ...asked, tools: [weather], toolChoice: "required", returnToolRequests: true });
  return answer.toolRequests[0].toolRequest.input.city ?? called;
});
await feature("structured", async () => (await ai.generate({ ...asked, output: { schema: Capital } })).output.city);
