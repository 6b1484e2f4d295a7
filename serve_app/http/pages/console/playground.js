// The playground: a form that becomes a request, and the answers beside each other.

import { Answer } from "./answers.js";
import { byId, copy, count, empty, make, seconds } from "./dom.js";
import { memory, save, showPast } from "./memory.js";
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
const NO_MODEL = "Tick a model above, or write its address, such as base:adapter or a mix base:one*0.6+two*0.4.";
const TEXTS = ["address", "prompt", "system", "message"];
const TICKS = ["likely", "streams"];
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
    form.ownerDocument.addEventListener("keydown", (event) => event.key === "Escape" && this.stopping?.abort());
    byId("export").addEventListener("click", () => save("serve_app-requests.json", JSON.stringify(memory.read().past, null, 1)));
    byId("forget").addEventListener("click", () => (memory.write({ ...memory.read(), past: [] }), showPast([])));
    byId("answers").replaceChildren(empty(FIRST));
    const { draft, past } = memory.read();
    this.wanted = draft ? this.restore(draft) : [];
    showPast(past, (each) => this.again(each));
  }

  /** Everything that was written into the form. */
  draft() {
    const texts = Object.fromEntries(TEXTS.map((id) => [id, byId(id).value]));
    const ticks = Object.fromEntries(TICKS.map((id) => [id, byId(id).checked]));
    return { ...texts, ...ticks, kind: this.kind, models: this.models, parameters: this.parameters.texts(), threads: [...this.threads] };
  }

  /** Writes a draft into the form; the models that were ticked then. */
  restore(draft) {
    for (const id of TEXTS) byId(id).value = draft[id] ?? "";
    for (const id of TICKS) byId(id).checked = draft[id];
    form.elements.kind.value = draft.kind;
    this.showKind();
    this.parameters.restore(draft.parameters);
    this.threads = new Map(draft.threads);
    return draft.models;
  }

  /** Puts an earlier request back into the form, with what was answered then. */
  again({ draft, answers }) {
    this.stopping?.abort();
    this.wanted = this.restore({ ...draft, threads: [...this.threads] });
    const cards = answers.map(({ name, text, end, turns = [] }) => {
      const card = new Answer(name, { turns, prompt: draft.kind === "chat" ? "" : draft.prompt });
      card.begin(text);
      card.end(end, "");
      return card.element;
    });
    byId("answers").replaceChildren(...cards);
    byId("legend").replaceChildren();
    show("problem", null);
    byId("summary").textContent = "An earlier request";
    void this.refresh().then(() => this.keep());
    byId("run").focus();
  }

  keep(past = memory.read().past) {
    if (byId("playground").hidden) return; // signed out meanwhile
    memory.write({ draft: this.draft(), past });
  }

  /** Adds what was asked and answered to the earlier requests. */
  remind(draft, cards) {
    const answers = cards.filter((card) => card.firstAt).map((card) => ({ name: card.name, text: card.words.data, end: card.tag.textContent, turns: card.turns }));
    if (!answers.length) return this.keep();
    this.keep([{ at: Date.now(), draft: { ...draft, threads: [] }, answers }, ...memory.read().past]);
    showPast(memory.read().past, (each) => this.again(each));
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
      const before = new Set(wanted.length ? wanted : this.wanted.length ? this.wanted : this.models);
      if (listed.length) this.wanted = [];
      const ticked = listed.filter((name) => before.has(name));
      this.offer(listed, new Set(ticked.length || byId("address").value ? ticked : listed.slice(0, 1)));
      show("problem", null);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.offer([], new Set(), "This key may not see which models there are.");
      show("problem", error);
      return error;
    }
    this.writeCode();
    return null;
  }

  offer(names, ticked, why = "No model is ready yet; this list fills by itself.") {
    const boxes = [...byId("chips").querySelectorAll("input")];
    if (names.length && boxes.map((box) => box.value).join("\n") === names.join("\n")) {
      for (const box of boxes) box.checked = ticked.has(box.value); // the focus stays
      return;
    }
    const chips = names.map((name) => make("label", {}, make("input", { type: "checkbox", value: name, checked: ticked.has(name) }), name));
    byId("chips").replaceChildren(...(chips.length ? chips : [make("p", { class: "muted" }, why)]));
  }

  pressed(event) {
    const sends = event.ctrlKey || event.metaKey || (event.target.id === "message" && !event.shiftKey && !event.isComposing);
    if (event.key === "Enter" && sends) event.preventDefault(), this.run();
  }

  changed(target) {
    if (target.name === "kind") this.showKind();
    this.writeCode();
    this.keep();
  }

  showKind() {
    for (const field of form.querySelectorAll("[data-kind]")) field.hidden = field.dataset.kind !== this.kind;
    this.parameters.use(this.kind);
    byId("run").textContent = RUNS[this.kind];
    unmark(form);
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
    if (!this.models.length) return mark(form, { param: "model", message: NO_MODEL });
    this.isRunning(true);
    const startedAt = performance.now();
    const requests = this.requests();
    const draft = this.draft();
    const before = [...byId("answers").children];
    byId("answers").replaceChildren();
    byId("legend").replaceChildren(...(byId("likely").checked ? [legend()] : []));
    if (matchMedia(NARROW).matches) byId("summary").scrollIntoView({ block: "start" });
    const cards = requests.map((request) => this.cardsOf(request));
    const outcomes = await Promise.all(requests.map((request, at) => this.one(request, cards[at], stopping.signal)));
    if (this.stopping !== stopping) return;
    this.stopping = null;
    this.isRunning(false);
    if (!byId("answers").children.length) byId("answers").append(...before);
    this.remind(draft, cards.flat());
    this.sum(outcomes.filter(Boolean), (performance.now() - startedAt) / 1000, stopping.signal.aborted);
  }

  cardsOf({ names, body }) {
    const number = Number.isInteger(body.n) && body.n > 0 && body.n <= 16 ? body.n : 1;
    const turns = this.kind === "chat" ? body.messages.slice() : [];
    const cards = names.flatMap((name) =>
      Array.from({ length: number }, (_, at) => new Answer(number > 1 ? `${name} #${at + 1}` : name, { turns, prompt: body.echo ? "" : body.prompt })),
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
    }
    if (error instanceof Refused) mark(form, error);
  }

  remember({ names: [name], body }, card) {
    const said = [body.messages.at(-1), { role: "assistant", content: card.words.data }];
    this.threads.set(name, [...(this.threads.get(name) ?? []), ...said]);
    if (byId("message").value === body.messages.at(-1).content) byId("message").value = "";
  }

  /** Forgets every chat. */
  startOver() {
    this.stopping?.abort();
    this.threads.clear();
    this.keep();
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
