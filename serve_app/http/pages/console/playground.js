// The playground: a form that becomes a request, and the answers beside each other.

import { Answer } from "./answers.js";
import { byId, copy, count, empty, make, seconds } from "./dom.js";
import { Parameters } from "./parameters.js";
import { mark, problem, show, unmark } from "./problems.js";
import { carryOut } from "./requests.js";
import { parametersOf } from "./schema.js";
import { Refused, ask } from "./service.js";
import { asCurl, asPython } from "./snippets.js";
import { legend } from "./tokens.js";

const form = byId("composer");
const NARROW = "(max-width: 860px)";
const FIRST = "A prompt is there already: press Complete. Tick several models to see them answer side by side.";
const RUNS = { completion: "Complete", chat: "Send" };

export class Playground {
  constructor(document) {
    const schemas = document.components.schemas;
    this.parameters = new Parameters({ completion: parametersOf(schemas.CompletionRequest), chat: parametersOf(schemas.ChatRequest) });
    this.threads = new Map();
    this.stopping = null;
    form.addEventListener("submit", (event) => (event.preventDefault(), this.run()));
    form.addEventListener("input", (event) => this.changed(event.target));
    form.addEventListener("keydown", (event) => this.pressed(event));
    byId("settings").open = !matchMedia(NARROW).matches;
    byId("anew").addEventListener("click", () => this.startOver());
    byId("stop").addEventListener("click", () => this.stopping?.abort());
    byId("code").addEventListener("toggle", () => this.writeCode());
    byId("copy-code").addEventListener("click", (event) => copy(byId("code-text").textContent, event.target));
    for (const button of form.ownerDocument.querySelectorAll("[data-language]")) {
      button.addEventListener("click", () => this.speak(button));
    }
    byId("answers").replaceChildren(empty(FIRST));
  }

  get kind() {
    return form.elements.kind.value;
  }

  /** Names that were ticked, and the address that was written. */
  get models() {
    const ticked = [...byId("chips").querySelectorAll("input:checked")].map((each) => each.value);
    const written = byId("address").value.trim();
    return written ? [...ticked, written] : ticked;
  }

  /** Looks what is served, and ticks these, else what was ticked before, else the first. The refusal, if it is refused. */
  async refresh(wanted = []) {
    try {
      const listed = (await ask("v1/models")).data.map((each) => each.id);
      const before = new Set(wanted.length ? wanted : this.models);
      const ticked = listed.filter((name) => before.has(name));
      this.offer(listed, new Set(ticked.length || byId("address").value ? ticked : listed.slice(0, 1)));
      show("problem", null);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.offer([], new Set());
      show("problem", error);
      return error;
    }
    this.writeCode();
    return null;
  }

  offer(names, ticked) {
    const boxes = [...byId("chips").querySelectorAll("input")];
    if (names.length && boxes.map((box) => box.value).join("\n") === names.join("\n")) {
      for (const box of boxes) box.checked = ticked.has(box.value); // the focus stays
      return;
    }
    const chips = names.map((name) => make("label", {}, make("input", { type: "checkbox", value: name, checked: ticked.has(name) }), name));
    byId("chips").replaceChildren(...(chips.length ? chips : [make("p", { class: "muted" }, "No model is ready yet; this list fills by itself.")]));
  }

  pressed(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.preventDefault(), this.run();
    if (event.key === "Escape") this.stopping?.abort();
  }

  changed(target) {
    if (target.name === "kind") {
      for (const field of form.querySelectorAll("[data-kind]")) field.hidden = field.dataset.kind !== this.kind;
      this.parameters.use(this.kind);
      byId("run").textContent = RUNS[this.kind];
      unmark(form);
    }
    this.writeCode();
  }

  /** Bodies and the names of the models that each is for: a chat has a thread with each model. */
  requests() {
    const shared = { ...this.likelihoods(), ...this.parameters.values() };
    if (byId("streams").checked) Object.assign(shared, { stream: true, stream_options: { include_usage: true } });
    if (this.kind === "completion") {
      const names = this.models;
      return [{ names, body: { model: names.length === 1 ? names[0] : names, prompt: byId("prompt").value, ...shared } }];
    }
    return this.models.map((name) => ({ names: [name], body: { model: name, messages: this.messagesTo(name), ...shared } }));
  }

  likelihoods() {
    if (!byId("likely").checked) return {};
    const most = this.parameters.known.get(this.kind === "chat" ? "top_logprobs" : "logprobs").form.maximum ?? 5;
    const number = Math.min(5, most);
    return this.kind === "chat" ? { logprobs: true, top_logprobs: number } : { logprobs: number };
  }

  messagesTo(name) {
    const system = byId("system").value;
    const first = system ? [{ role: "system", content: system }] : [];
    return [...first, ...(this.threads.get(name) ?? []), { role: "user", content: byId("message").value }];
  }

  async run() {
    this.stopping?.abort();
    const stopping = (this.stopping = new AbortController());
    unmark(form);
    show("problem", null);
    this.isRunning(true);
    const startedAt = performance.now();
    const requests = this.requests();
    if (!requests.length) requests.push({ names: [], body: this.nobody() });
    byId("answers").replaceChildren();
    byId("legend").replaceChildren(...(byId("likely").checked ? [legend()] : []));
    if (matchMedia(NARROW).matches) byId("summary").scrollIntoView({ block: "start" });
    const cards = requests.map((request) => this.cardsOf(request));
    const outcomes = await Promise.all(requests.map((request, at) => this.one(request, cards[at], stopping.signal)));
    if (this.stopping !== stopping) return;
    this.stopping = null;
    this.isRunning(false);
    this.sum(outcomes.filter(Boolean), (performance.now() - startedAt) / 1000, stopping.signal.aborted);
  }

  /** No model is chosen: the service says what that means. */
  nobody() {
    return this.kind === "chat" ? { model: [], messages: this.messagesTo("") } : { model: [], prompt: byId("prompt").value };
  }

  cardsOf({ names, body }) {
    const number = Number.isInteger(body.n) && body.n > 0 && body.n <= 16 ? body.n : 1;
    const turns = this.kind === "chat" ? body.messages.slice() : [];
    const cards = names.flatMap((name) =>
      Array.from({ length: number }, (_, at) => new Answer(number > 1 ? `${name} #${at + 1}` : name, { turns })),
    );
    byId("answers").append(...cards.map((card) => card.element));
    return cards;
  }

  /** The usage of one request; null where it came to nothing. */
  async one({ names, body }, cards, signal) {
    const answerOf = (index) => {
      cards[index] ??= new Answer(`${names.at(-1)} #${index + 1}`);
      if (!cards[index].element.isConnected) byId("answers").append(cards[index].element);
      return cards[index];
    };
    try {
      const usage = await carryOut(this.kind, body, { answerOf, signal });
      cards.forEach((card) => card.finish("stop"));
      if (this.kind === "chat") this.remember({ names, body }, cards[0]);
      return usage;
    } catch (error) {
      if (error.name === "AbortError") cards.forEach((card) => card.stop());
      else this.refused(error, cards);
      return null;
    }
  }

  refused(error, cards) {
    if (cards.some((card) => card.firstAt)) {
      cards.forEach((card) => card.fail(error));
    } else {
      cards.forEach((card) => card.element.remove());
      byId("problem").append(problem(error));
      if (!byId("answers").children.length) byId("answers").append(empty("Nothing was written."));
    }
    if (error instanceof Refused) mark(form, error);
  }

  remember({ names: [name], body }, card) {
    const said = [body.messages.at(-1), { role: "assistant", content: card.words.data }];
    this.threads.set(name, [...(this.threads.get(name) ?? []), ...said]);
    byId("message").value = "";
  }

  /** Forgets every chat. */
  startOver() {
    this.stopping?.abort();
    this.threads.clear();
    byId("answers").replaceChildren(empty("Every model begins a new chat."));
    byId("message").focus();
  }

  isRunning(isOn) {
    const [run, stop] = [byId("run"), byId("stop")];
    const [from, to] = isOn ? [run, stop] : [stop, run];
    const hadFocus = document.activeElement === from;
    to.disabled = false;
    if (hadFocus) to.focus();
    from.disabled = true;
    if (isOn) byId("summary").textContent = "Writing …";
  }

  sum(usages, taken, isStopped) {
    const of = (name) => usages.reduce((sum, usage) => sum + (usage?.[name] ?? 0), 0);
    const told = `${count(of("prompt_tokens"))} prompt tokens, ${count(of("completion_tokens"))} written, in ${seconds(taken)}`;
    byId("summary").textContent = isStopped ? `Stopped after ${seconds(taken)}` : usages.length ? told : "";
  }

  speak(chosen) {
    for (const button of document.querySelectorAll("[data-language]")) button.setAttribute("aria-pressed", String(button === chosen));
    this.writeCode();
  }

  writeCode() {
    if (!byId("code").open) return;
    const isCurl = document.querySelector("[data-language=curl]").getAttribute("aria-pressed") === "true";
    const write = isCurl ? asCurl : asPython;
    byId("code-text").textContent = this.requests().map(({ body }) => write(this.kind, body)).join("\n\n") || "Choose a model first.";
  }
}
