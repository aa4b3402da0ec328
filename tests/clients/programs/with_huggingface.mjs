import { InferenceClient } from "@huggingface/inference";
import { ASK, FEW, MODEL, TOOL, URL_, argument, feature, pieces } from "./features.mjs";

const client = new InferenceClient("hf_none", { endpointUrl: URL_ });
const asked = { model: MODEL, messages: ASK, max_tokens: FEW };

await feature("chat", async () => (await client.chatCompletion(asked)).choices[0].message.content);
await feature("stream", async () => pieces(client.chatCompletionStream(asked), (part) => part.choices[0]?.delta.content));
await feature("tools", async () => {
  const answer = await client.chatCompletion({ ...asked, tools: [TOOL], tool_choice: "required" });
  return argument(answer.choices[0].message.tool_calls[0].function.arguments);
});
