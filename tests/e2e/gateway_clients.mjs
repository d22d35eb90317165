// Asks a gateway through the official Node libraries, whole and streamed, and prints what they understood.
// Standard input is {"sessions": [{"url": ..., "key": ..., "model": ...}]}; the libraries are found from the working directory.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { join } from "node:path";

const require = createRequire(join(process.cwd(), "index.js"));
const OpenAI = require("openai").default ?? require("openai");
const Anthropic = require("@anthropic-ai/sdk").default ?? require("@anthropic-ai/sdk");
const { GoogleGenAI } = require("@google/genai");

const parameters = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } }, required: ["a", "b"] };
const content = "What is 1 + 2?";

async function askChat({ url, key, model }) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
  const messages = [{ role: "user", content }];
  const tools = [{ type: "function", function: { name: "add", parameters } }];
  const whole = await client.chat.completions.create({ model, messages });
  let text = "";
  for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  const called = await client.chat.completions.create({ model, messages, tools });
  return [whole.choices[0].message.content, text, called.choices[0].message.tool_calls[0].function.name];
}

async function askResponses({ url, key, model }) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
  const tools = [{ type: "function", name: "add", parameters, strict: false }];
  const whole = await client.responses.create({ model, input: content });
  const streamed = await client.responses.stream({ model, input: content }).finalResponse();
  const called = await client.responses.stream({ model, input: content, tools }).finalResponse();
  return [whole.output_text, streamed.output_text, called.output.find((item) => item.type === "function_call").name];
}

async function askAnthropic({ url, key, model }) {
  const client = new Anthropic({ baseURL: url, apiKey: key });
  const messages = [{ role: "user", content }];
  const tools = [{ name: "add", input_schema: parameters }];
  const whole = await client.messages.create({ model, max_tokens: 99, messages });
  const streamed = await client.messages.stream({ model, max_tokens: 99, messages }).finalMessage();
  const called = await client.messages.stream({ model, max_tokens: 99, messages, tools }).finalMessage();
  return [whole.content[0].text, streamed.content[0].text, called.content.find((block) => block.type === "tool_use").name];
}

async function askGemini({ url, key, model }) {
  const client = new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: url } });
  const config = { tools: [{ functionDeclarations: [{ name: "add", parameters }] }] };
  const whole = await client.models.generateContent({ model, contents: content });
  let text = "";
  for await (const chunk of await client.models.generateContentStream({ model, contents: content })) text += chunk.text ?? "";
  const called = await client.models.generateContent({ model, contents: content, config });
  return [whole.text, text, called.functionCalls[0].name];
}

const { sessions } = JSON.parse(readFileSync(0, "utf8"));
const answers = [];
for (const session of sessions) {
  const found = {};
  for (const [name, ask] of Object.entries({ chat: askChat, responses: askResponses, anthropic: askAnthropic, gemini: askGemini })) {
    found[name] = await ask(session);
  }
  answers.push(found);
}
process.stdout.write(JSON.stringify(answers));
