"use strict";
// The chat box: streams answers of /v1/chat/completions, or of /v1/completions if the model has no chat template.

/** Yields the data of server-sent events. */
async function* serverEvents(body) {
  const decoder = new TextDecoder();
  let text = "";
  for (const reader = body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const event = text.slice(0, end);
      text = text.slice(end + 2);
      if (event.startsWith("data: ")) yield event.slice(6);
    }
  }
}

/** The message of an error answer, whatever its body is. */
async function errorMessage(response) {
  const body = await response.text();
  try {
    return JSON.parse(body).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

class Chat {
  /** `headers`: () -> headers of a call, for the API key. */
  constructor(headers) {
    this.headers = headers;
    this.history = [];
    this.running = null;
    this.template = true;
    this.model = null;
    this.list = byId("chat-messages");
    this.readout = byId("chat-readout");
    this.input = byId("chat-input");
    this.button = byId("chat-send");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.send();
      }
    });
    byId("chat-clear").addEventListener("click", () => this.clear());
    this.clear();
  }

  configure(facts) {
    if (this.model === facts.model && this.template === facts.chat) return;
    Object.assign(this, { model: facts.model, template: facts.chat });
    setText(byId("chat-title"), facts.chat ? "Chat" : "Completion");
    if (!this.history.length) this.clear();
  }

  clear() {
    this.running?.abort();
    this.history = [];
    const hint = this.template
      ? "Ask something; the answer streams in here."
      : "This model has no chat template. Write the beginning of a text; it is continued here.";
    this.list.replaceChildren(element("p", "hint", hint));
    setText(this.readout, "\u00a0");
  }

  request(text) {
    const common = {
      model: this.model,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number(byId("chat-max").value) || 256,
      temperature: Number(byId("chat-temperature").value) || 0,
    };
    if (!this.template) return ["v1/completions", { ...common, prompt: text }];
    const messages = [...this.history, { role: "user", content: text }];
    return ["v1/chat/completions", { ...common, messages }];
  }

  add(role, text = "") {
    this.list.querySelector(".hint")?.remove();
    const message = element("div", `message ${role}`);
    const reasoning = element("span", "reasoning"), content = element("span", "content", text);
    message.append(reasoning, content);
    this.list.append(message);
    this.list.scrollTop = this.list.scrollHeight;
    return { message, reasoning, content };
  }

  async send() {
    const text = this.input.value.trim();
    if (!text) return;
    const [path, body] = this.request(text);
    this.input.value = "";
    this.add("user", text);
    const answer = this.add("assistant pending");
    this.running = new AbortController();
    this.showRunning(true);
    const figures = { sent: performance.now(), first: null, last: null, chunks: 0, usage: null, reason: null };
    try {
      const response = await fetch(path, {
        method: "POST",
        headers: { "Content-Type": "application/json", ...this.headers() },
        body: JSON.stringify(body),
        signal: this.running.signal,
      });
      if (!response.ok) throw new Error(await errorMessage(response));
      await this.receive(response.body, answer, figures);
    } catch (error) {
      if (error.name === "AbortError") figures.reason = "stopped";
      else this.add("error", error.message);
    }
    answer.message.classList.remove("pending");
    if (answer.content.textContent || answer.reasoning.textContent) {
      this.history.push({ role: "user", content: text }, { role: "assistant", content: answer.content.textContent });
    } else if (figures.reason === null) {
      answer.message.remove();
    }
    this.running = null;
    this.showRunning(false);
    this.showFigures(figures);
  }

  async receive(body, answer, figures) {
    for await (const data of serverEvents(body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) figures.usage = chunk.usage;
      for (const choice of chunk.choices) this.show(choice, answer, figures);
      this.showFigures(figures);
    }
    throw new Error("The stream ended before the answer was complete.");
  }

  show(choice, answer, figures) {
    const delta = choice.delta ?? {};
    const content = choice.text ?? delta.content ?? "";
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (content || reasoning) {
      figures.last = performance.now();
      figures.first ??= figures.last;
      figures.chunks += 1;
    }
    if (choice.finish_reason) figures.reason = choice.finish_reason;
    const follow = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
    answer.content.append(content);
    answer.reasoning.append(reasoning);
    if (follow) this.list.scrollTop = this.list.scrollHeight;
  }

  showFigures({ sent, first, last, chunks, usage, reason }) {
    if (first === null) {
      setText(this.readout, this.running ? "Waiting for the first token" : reason ?? "\u00a0");
      return;
    }
    const tokens = usage?.completion_tokens ?? chunks;
    const parts = [`TTFT ${durationText((first - sent) / 1000)}`];
    if (last > first && tokens > 1) parts.push(`${compact((tokens - 1) / ((last - first) / 1000))} tokens/s`);
    parts.push(plural(tokens, "token"));
    if (usage) parts.push(`prompt ${compact(usage.prompt_tokens)}`);
    if (reason) parts.push(reason);
    setText(this.readout, parts.join(" · "));
  }

  showRunning(running) {
    setText(this.button, running ? "Stop" : "Send");
    this.button.classList.toggle("stop", running);
  }
}
