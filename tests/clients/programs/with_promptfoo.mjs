import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { FEW, KEY, MODEL, SCHEMA, V1, argument, feature } from "./features.mjs";

const folder = mkdtempSync(join(tmpdir(), "promptfoo-"));
const quiet = { PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CONFIG_DIR: folder };

function evaluated(provider, config, prompt = "What is the capital of {{country}}?") {
  const out = join(folder, "out.json"), at = join(folder, "promptfooconfig.json");
  const providers = [{ id: `${provider}:${MODEL}`, config }];
  const prompts = [prompt];
  writeFileSync(at, JSON.stringify({ prompts, providers, tests: [{ vars: { country: "Germany" } }] }));
  const words = ["eval", "--config", at, "--output", out, "--no-cache", "--no-table", "--no-write"];
  execFileSync("node_modules/.bin/promptfoo", words, { env: { ...process.env, ...quiet }, stdio: "pipe" });
  const [result] = JSON.parse(readFileSync(out)).results.results;
  if (result.error) throw new Error(result.error);
  return result.response.output;
}

const few = { apiBaseUrl: V1, apiKey: KEY, max_tokens: FEW };
const shape = { type: "json_schema", json_schema: { name: "capital", strict: true, schema: SCHEMA } };
await feature("chat", async () => evaluated("openai:chat", few));
await feature("completions", async () => evaluated("openai:completion", few, "France, Italy, {{country}},"));
await feature("responses", async () => evaluated("openai:responses", { ...few, max_output_tokens: FEW }));
await feature("structured", async () => argument(evaluated("openai:chat", { ...few, response_format: shape })));
