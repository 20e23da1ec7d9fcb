// The client of Hugging Face for JavaScript, against the scripted server. One line of JSON.
import { InferenceClient } from "@huggingface/inference";

const [url] = process.argv.slice(2);
const client = new InferenceClient("none", { endpointUrl: url });
const inputs = "[[say Hi there.]]";
const messages = [{ role: "user", content: inputs }];

async function joined(stream, text) {
  let whole = "";
  for await (const event of stream) whole += text(event);
  return whole;
}

async function failure(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return JSON.stringify([error.message, error.httpResponse?.body]);
  }
}

const generated = await client.textGeneration({ inputs, parameters: { max_new_tokens: 64 } });
const streamed = await joined(
  client.textGenerationStream({ inputs, stream: true }),
  (event) => event.choices[0]?.text ?? "",
);
const chat = await client.chatCompletion({ model: "tgi", messages });
const chunks = await joined(
  client.chatCompletionStream({ model: "tgi", messages }),
  (event) => event.choices[0]?.delta?.content ?? "",
);
const refused = await failure(client.textGeneration({ inputs: "word ".repeat(150_000) }));
const data = new Blob([new Uint8Array(64)], { type: "audio/wav" });
const heard = await failure(client.automaticSpeechRecognition({ data }));
const called = await failure(client.chatCompletion({ messages: "none" }));
console.log(
  JSON.stringify({
    generated: generated.generated_text,
    streamed,
    chat: chat.choices[0].message.content,
    chunks,
    refused,
    heard,
    called,
  }),
);
