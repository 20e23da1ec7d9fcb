// Streams a chat and a completion with the official client, and prints one line of JSON.
import OpenAI, { APIError, NotFoundError } from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const sampling = { model, temperature: 0, max_tokens: 24 };

const whole = await client.chat.completions.create({ messages, ...sampling });

let text = "";
let usage = null;
let role = null;
let finish = null;
let chunks = 0;
const stream = await client.chat.completions.create({
  messages,
  ...sampling,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  chunks += 1;
  usage = chunk.usage ?? usage;
  for (const choice of chunk.choices) {
    role = choice.delta.role ?? role;
    text += choice.delta.content ?? "";
    finish = choice.finish_reason ?? finish;
  }
}

const runner = client.chat.completions.stream({ messages, ...sampling });
const final = await runner.finalChatCompletion();

let continued = "";
for await (const chunk of await client.completions.create({ prompt: "Once", ...sampling, stream: true })) {
  continued += chunk.choices[0]?.text ?? "";
}

let error = null;
try {
  await client.chat.completions.create({ messages, ...sampling, model: "no-such-model" });
} catch (caught) {
  error = { notFound: caught instanceof NotFoundError, api: caught instanceof APIError, status: caught.status };
}

const aborted = await client.chat.completions.create({ messages, model, stream: true });
for await (const _ of aborted) {
  aborted.controller.abort();
  break;
}

const models = [];
for await (const card of client.models.list()) models.push(card.id);

console.log(JSON.stringify({
  whole: whole.choices[0].message.content,
  text, role, finish, usage, chunks, models, error, continued,
  final: final.choices[0].message.content,
}));
