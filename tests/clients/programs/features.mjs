// What the programs share: where the server is, what is asked, and one line of JSON for every feature that is tried.
export const URL_ = process.env.WEFT_URL, V1 = URL_ + "/v1", MODEL = process.env.WEFT_MODEL, KEY = "none", FEW = 48;
export const QUESTION = "What is the capital of Germany?", ASK = [{ role: "user", content: QUESTION }];
export const SCHEMA = {
  type: "object", properties: { city: { type: "string", enum: ["Berlin", "Paris"] } }, required: ["city"],
  additionalProperties: false,
};
export const ABOUT = "Tell the weather of a city.";
export const TOOL = { type: "function", function: { name: "weather", description: ABOUT, parameters: SCHEMA } };

export async function feature(name, run) {
  let how;
  try {
    const came = await run();
    how = { ok: Boolean(came), said: (typeof came === "string" ? came : JSON.stringify(came) ?? "").slice(0, 80) };
  } catch (error) {
    let status = null;
    for (let one = error; one && !status; one = one.cause ?? one.lastError) status = [one.status, one.statusCode].find(Number.isInteger) ?? null;
    how = { ok: false, status, said: `${error?.name}: ${error?.message} ${error?.responseBody ?? error?.cause ?? ""}`.slice(0, 1500) };
  }
  console.log("FEATURE " + JSON.stringify({ feature: name, ...how }));
}

export async function pieces(parts, text = (part) => part) {
  const texts = [];
  for await (const part of parts) if (text(part)) texts.push(text(part));
  if (texts.length < 2) throw new Error(`${texts.length} pieces came`);
  return texts.join("");
}

export function argument(text) {
  const { city } = typeof text === "string" ? JSON.parse(text) : text;
  if (!["Berlin", "Paris"].includes(city)) throw new Error(`the city is ${city}`);
  return city;
}
