import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { ABOUT, FEW, KEY, MODEL, QUESTION, SCHEMA, V1, argument, feature, pieces } from "./features.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const runner = new Runner();
const overChat = new OpenAIChatCompletionsModel(client, MODEL), overResponses = new OpenAIResponsesModel(client, MODEL);
let called;
const weather = tool({
  name: "weather", description: ABOUT, parameters: SCHEMA, strict: true,
  execute: async (given) => { called = argument(given); return "It rains."; },
});
const agent = (model, more = {}) => new Agent({
  name: "One", instructions: "Be brief.", model, ...more, modelSettings: { maxTokens: FEW, ...more.modelSettings },
});
const forced = { tools: [weather], toolUseBehavior: "stop_on_first_tool", modelSettings: { toolChoice: "required", parallelToolCalls: false } };

await feature("chat", async () => (await runner.run(agent(overChat), QUESTION)).finalOutput);
await feature("stream", async () => pieces((await runner.run(agent(overChat), QUESTION, { stream: true })).toTextStream()));
await feature("tools", async () => { await runner.run(agent(overChat, forced), QUESTION); return called; });
await feature("responses", async () => {
  called = undefined;
  await runner.run(agent(overResponses, forced), QUESTION);
  return called;
});
