// Vercel's AI SDK with each of its providers, against the scripted server: one line of JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(options);
const compatible = createOpenAICompatible({
  ...options,
  name: "cpuserve",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = {
  compatible,
  responses: openai,
  chat: openai.chat,
  anthropic: createAnthropic(options),
};

const looked = [];
const weather = tool({
  description: "Tell the weather.",
  inputSchema: z.object({ city: z.string() }),
  execute: async (input) => (looked.push(input.city), "sunny"),
});
const loop =
  '[[think Where is it?]] [[calls weather {"city": "Paris"} ;; weather {"city": "Rome"}]] ' +
  '[[call weather {"city": "Oslo"}]] [[think Now I know.]] [[say It is sunny in Paris.]]';
const person = z.object({ name: z.string(), age: z.number() });
const ann = 'Ann is 7. [[say {"name": "Ann", "age": 7}]]';
const cut = '[[raw <tool_call>\n{"name": "weather", "arguments": {"city": "Par" 1}}\n</tool_call>]] [[say I go on.]]';

// A red picture of 8 x 8 pixels.
const red = Buffer.from(
  "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP8z4AdMOEQH6QSAM1BAQ/oQeJvAAAAAElFTkSuQmCC",
  "base64",
);
const shows = tool({
  description: "Take a screenshot.",
  inputSchema: z.object({}),
  execute: async () => "taken",
  toModelOutput: () => ({
    type: "content",
    value: [{ type: "media", mediaType: "image/png", data: red.toString("base64") }],
  }),
});

async function look(fields) {
  const image = { type: "image", image: red, mediaType: "image/png" };
  const content = [{ type: "text", text: "[[say I see it.]]" }, image];
  const seen = await generateText({ ...fields, messages: [{ role: "user", content }] });
  const tools = { tools: { shows }, stopWhen: stepCountIs(3) };
  const shot = await generateText({ ...fields, ...tools, prompt: "[[call shows {}]] [[say A screen.]]" });
  return { seen: seen.text, tokens: seen.usage.inputTokens, shot: shot.text };
}

async function failure(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    const cause = error.lastError ?? error;
    return { name: cause.name, status: cause.statusCode, message: cause.message };
  }
}

async function tryProvider(provider) {
  const model = provider("scripted");
  const fields = { model, maxRetries: 0, maxOutputTokens: 500 };
  const tools = { tools: { weather }, stopWhen: stepCountIs(6) };
  looked.length = 0;
  const whole = await generateText({ ...fields, ...tools, prompt: loop });
  const cities = [...looked];
  const errors = [];
  const stream = streamText({
    ...fields,
    ...tools,
    prompt: loop,
    onError: ({ error }) => errors.push(String(error)),
  });
  let text = "";
  let thought = "";
  for await (const part of stream.fullStream) {
    if (part.type === "text-delta") text += part.text;
    if (part.type === "reasoning-delta") thought += part.text;
  }
  const formed = await generateText({ ...fields, prompt: ann, output: Output.object({ schema: person }) });
  const forced = await generateText({
    ...fields,
    tools: { weather },
    toolChoice: { type: "tool", toolName: "weather" },
    prompt: loop.slice(loop.indexOf("[[call weather")),
  });
  const short = await generateText({ ...fields, maxOutputTokens: 2, prompt: "[[say one two three four]]" });
  const broken = await generateText({ ...fields, ...tools, prompt: cut });
  return {
    text: whole.text,
    cities,
    thoughts: whole.steps.map((step) => step.reasoningText ?? null),
    finish: whole.steps.map((step) => step.finishReason),
    usage: whole.totalUsage,
    cached: whole.steps.map((step) => step.usage.inputTokenDetails.cacheReadTokens),
    streamed: { text, thought, errors, usage: await stream.totalUsage },
    formed: formed.output,
    forced: forced.toolCalls.map((call) => call.input),
    short: short.finishReason,
    broken: broken.text,
    look: await look(fields),
    long: await failure(generateText({ ...fields, prompt: "word ".repeat(20000) })),
    unknown: await failure(generateText({ ...fields, model: provider("other"), prompt: "hi" })),
  };
}

const found = {};
for (const [name, provider] of Object.entries(models)) found[name] = await tryProvider(provider);
console.log(JSON.stringify(found));
