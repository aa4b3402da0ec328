import { openAICompatible } from "@genkit-ai/compat-oai";
import { genkit, z } from "genkit";
import { ABOUT, FEW, KEY, MODEL, QUESTION, V1, argument, feature, pieces } from "./features.mjs";

const ai = genkit({ plugins: [openAICompatible({ name: "weft", apiKey: KEY, baseURL: V1 })] });
const Capital = z.object({ city: z.enum(["Berlin", "Paris"]) });
const asked = { model: `weft/${MODEL}`, prompt: QUESTION, config: { max_tokens: FEW } };
const weather = ai.defineTool({ name: "weather", description: ABOUT, inputSchema: Capital }, async ({ city }) => `It rains in ${city}.`);

await feature("chat", async () => (await ai.generate(asked)).text);
await feature("stream", async () => pieces(ai.generateStream(asked).stream, (chunk) => chunk.text));
await feature("tools", async () => {
  const answer = await ai.generate({ ...asked, tools: [weather], returnToolRequests: true }); // It sends no tool_choice.
  return answer.toolRequests.length ? argument(answer.toolRequests[0].toolRequest.input) : answer.text;
});
