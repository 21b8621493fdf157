// The endpoint as the page asks it: what is served, and answers chunk by chunk.
// Paths are relative to the page, so that a proxy may put all of it under a prefix.

const KEY = "draftloop-api-key"; // sessionStorage: of this tab, until it is closed

export class ApiError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }

  // One line that names the parameter, if the message does not begin with it.
  get line() {
    return this.param && !this.message.startsWith(this.param) ? `${this.param}: ${this.message}` : this.message;
  }
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await connected(fetch(path, { ...options, headers }), "the server does not answer; is it running?");
  if (!response.ok) throw await refusal(response);
  return response;
}

// A fetch that fails says why only to the browser's log; one that was stopped stays an AbortError.
async function connected(work, otherwise) {
  try {
    return await work;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(otherwise);
  }
}

async function refusal(response) {
  const status = response.status;
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { status, param: error.param });
  } catch {
    return new ApiError(`the server answers ${status} ${response.statusText}`, { status });
  }
}

// The entry of /v1/models: id, max_model_len, metadata.drafter.
export async function servedModel() {
  const response = await ask("v1/models", { cache: "no-store" });
  return (await response.json()).data[0];
}

async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await connected(reader.read(), "the stream broke off; try again");
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice("data: ".length);
  }
}

async function* chunks(path, body, signal) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true, include_tokens: true } };
  const headers = { "Content-Type": "application/json" };
  const response = await ask(path, { method: "POST", headers, body: JSON.stringify(streamed), signal });
  for await (const event of serverSentEvents(response)) {
    if (event === "[DONE]") return;
    const chunk = JSON.parse(event);
    if (chunk.error) throw new ApiError(chunk.error.message, { param: chunk.error.param });
    yield chunk;
  }
  throw new ApiError("the stream ended too early; try again");
}

let chatTemplate = true;

// Whether the target has a chat template, as far as its answers have told.
export function hasChatTemplate() {
  return chatTemplate;
}

function lacksChatTemplate(error) {
  return error instanceof ApiError && error.param === "messages" && error.message.includes("no chat template");
}

// Chunks of the answer to a prompt. Where the target has no chat template it continues the prompt as text.
export async function* decode({ prompt, system, ...options }, signal) {
  if (chatTemplate) {
    const messages = [{ role: "user", content: prompt }];
    if (system) messages.unshift({ role: "system", content: system });
    try {
      yield* chunks("v1/chat/completions", { ...options, messages }, signal);
      return;
    } catch (error) {
      if (!lacksChatTemplate(error)) throw error;
      chatTemplate = false;
    }
  }
  yield* chunks("v1/completions", { ...options, prompt }, signal);
}
