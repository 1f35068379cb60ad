// The JavaScript openai package: chat, streams and their helper, tools, embeddings, responses.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];

const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
const text = answer.choices[0].message.content;
assert.match(text, /Paris/);

let streamed = "";
let usage;
const stream = await client.chat.completions.create({
  model,
  messages,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.deepEqual(usage, answer.usage);

const helper = client.chat.completions.stream({ model, messages, temperature: 0 });
assert.equal(await helper.finalContent(), text);

const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the current weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
    },
  },
};
const call = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  tools: [weather],
  tool_choice: { type: "function", function: { name: "get_weather" } },
  temperature: 0,
});
assert.equal(call.choices[0].finish_reason, "tool_calls");
const [made] = call.choices[0].message.tool_calls;
assert.deepEqual(Object.keys(JSON.parse(made.function.arguments)), ["city"]);

const vectors = await client.embeddings.create({ model, input: ["A cat sat.", "A dog ran."] });
assert.equal(vectors.data.length, 2);
assert.equal(vectors.data[0].embedding.length, vectors.data[1].embedding.length);

const response = await client.responses.create({
  model,
  input: "What is the capital of France?",
  temperature: 0,
});
assert.equal(response.output_text, text);
let joined = "";
const events = await client.responses.create({
  model,
  input: "What is the capital of France?",
  temperature: 0,
  stream: true,
});
for await (const event of events) {
  if (event.type === "response.output_text.delta") joined += event.delta;
}
assert.equal(joined, text);

await assert.rejects(
  client.chat.completions.create({ model: "no-such-model", messages }),
  OpenAI.NotFoundError,
);
