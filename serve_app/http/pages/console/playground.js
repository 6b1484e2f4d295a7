// The playground: a form that becomes a request, and the answers beside each other.

import { Answer } from "./answers.js";
import { Chosen } from "./chosen.js";
import { byId, count, empty, make, on, seconds } from "./dom.js";
import { Images } from "./images.js";
import { memory, replyOf, textOf, threadOf } from "./memory.js";
import { Parameters } from "./parameters.js";
import { Past } from "./past.js";
import { mark, problem, show, unmark } from "./problems.js";
import { carryOut } from "./requests.js";
import { parametersOf } from "./schema.js";
import { Refused } from "./service.js";
import { Code } from "./snippets.js";
import { legend } from "./tokens.js";
import { Tools } from "./tools.js";

const form = byId("composer");
const NARROW = "(max-width: 860px)";
const FIRST = { completion: "A prompt is there already: press Complete.", chat: "Write a message and press Send." };
const GOES_ON = "The chat goes on where it was. Start over begins a new one.";
const NO_MODEL = "Tick a model above, or write its address, such as base:adapter or a mix base:one*0.6+two*0.4.";
const TEXTS = ["address", "prompt", "system", "message"];
const TICKS = ["likely", "streams", "markdown"];
const RUNS = { completion: "Complete", chat: "Send" };

export class Playground {
  constructor(document) {
    const schemas = document.components.schemas;
    const ofChats = parametersOf(schemas.ChatRequest);
    ofChats.delete("tools"); // they have fields of their own
    this.chosen = new Chosen();
    this.parameters = new Parameters({ completion: parametersOf(schemas.CompletionRequest), chat: ofChats });
    this.images = new Images();
    this.tools = new Tools();
    this.past = new Past((request) => this.again(request));
    this.code = new Code(() => this.requests());
    this.wanted = []; // models that are to be ticked once they are served
    this.threads = new Map();
    this.chat = Date.now(); // names what the threads have in common
    on(form, "submit", () => this.run());
    on(form, "input", (event) => this.changed(event.target));
    on(form, "keydown", (event) => this.pressed(event));
    byId("settings").open = !matchMedia(NARROW).matches;
    on("anew", "click", () => this.startOver());
    on("stop", "click", () => this.stopping?.abort());
    on(form.ownerDocument, "keydown", (event) => event.key === "Escape" && this.stopping?.abort());
    this.first = empty(FIRST.completion);
    byId("answers").replaceChildren(this.first);
    if (memory.draft) this.wanted = this.restore(memory.draft);
  }

  /** Everything that was written into the form. */
  draft() {
    const texts = Object.fromEntries(TEXTS.map((id) => [id, byId(id).value]));
    const ticks = Object.fromEntries(TICKS.map((id) => [id, byId(id).checked]));
    return { ...texts, ...ticks, kind: this.kind, models: [...this.wanted, ...this.chosen.names], parameters: this.parameters.texts(), tools: this.tools.texts(), threads: [...this.threads], chat: this.chat };
  }

  /** Writes a draft into the form; the models that were ticked then. */
  restore(draft) {
    for (const id of TEXTS) byId(id).value = draft[id] ?? "";
    for (const id of TICKS) byId(id).checked = draft[id];
    form.elements.kind.value = draft.kind;
    this.showKind();
    this.parameters.restore(draft.parameters);
    this.tools.restore(draft.tools);
    this.threads = new Map(draft.threads);
    this.chat = draft.chat ?? Date.now();
    return draft.models;
  }

  /** Puts an earlier request back into the form, with what was answered then; a chat goes on from there. */
  again({ draft, answers }) {
    this.drop();
    const isChat = draft.kind === "chat";
    const before = isChat ? { message: "", threads: answers.map(threadOf).reverse() } : { threads: [...this.threads], chat: this.chat };
    const models = this.restore({ ...draft, ...before });
    const cards = answers.map(({ name, text, end, turns = [], calls = [] }) => {
      const reply = (results) => this.goOn(name.split(" #")[0], results, card);
      const card = new Answer(name, { turns, prompt: isChat ? "" : draft.prompt, reply });
      card.begin(text);
      calls.forEach((call, index) => card.call({ index, ...call }));
      card.end(end, "");
      if (calls.length) card.askForResults();
      return card.element;
    });
    byId("answers").replaceChildren(...cards);
    byId("legend").replaceChildren();
    show("problem", null);
    byId("summary").textContent = isChat ? "An earlier chat, which goes on from here" : "An earlier request";
    void this.refresh(models).then(() => this.keep());
    byId(isChat ? "message" : "run").focus();
  }

  keep() {
    if (byId("sign-in").hidden) memory.draft = this.draft();
  }

  /** Adds what was asked and answered to the earlier requests. */
  remind(draft, cards) {
    if (!byId("sign-in").hidden) return; // signed out meanwhile
    const answers = cards.filter((card) => card.firstAt).map((card) => ({ name: card.name, text: card.words.data, calls: card.calls, end: card.tag.textContent, turns: card.turns }));
    this.keep();
    if (answers.length) this.past.add({ at: Date.now(), draft: { ...draft, threads: [] }, answers });
  }

  get kind() {
    return form.elements.kind.value;
  }

  /** Looks what is served, and ticks these, else what was ticked or wanted before, else the first. The refusal, if it is refused. */
  async refresh(wanted = []) {
    try {
      const listed = await this.chosen.served();
      const before = new Set(wanted.length ? wanted : [...this.wanted, ...this.chosen.names]);
      before.delete(byId("address").value.trim());
      const ticked = listed.filter((name) => before.has(name));
      this.wanted = [...before].filter((name) => !ticked.includes(name));
      this.chosen.offer(listed, new Set(before.size || byId("address").value ? ticked : listed.slice(0, 1)));
      this.showKind();
      this.past.show();
      if (this.fault) show("problem", (this.fault = null)); // what a request was refused for stays
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.chosen.offer([], new Set(), "This key may not see which models there are.");
      show("problem", (this.fault = error));
      return error;
    }
    this.code.write();
    return null;
  }

  pressed(event) {
    const sends = event.ctrlKey || event.metaKey || (event.target.id === "message" && !event.shiftKey && !event.isComposing);
    if (event.key === "Enter" && sends) event.preventDefault(), this.run();
  }

  changed(target) {
    const isModel = target.closest("[data-parameter=model]");
    if (isModel) this.wanted = [];
    if (isModel || target.name === "kind") unmark(form), this.showKind();
    this.code.write();
    this.keep();
  }

  /** Shows the fields of this kind of request that one of the chosen models can take, and what they cannot do. */
  showKind() {
    for (const field of form.querySelectorAll("[data-kind]")) {
      const { kind, takes } = field.dataset;
      field.hidden = kind !== this.kind || (takes !== undefined && !this.chosen.can(takes));
    }
    this.chosen.tell(this.kind, this.wanted);
    this.parameters.use(this.kind, (name) => this.chosen.refusing(name));
    byId("run").textContent = RUNS[this.kind];
    this.first.textContent = this.kind === "chat" && this.threads.size ? GOES_ON : FIRST[this.kind];
  }

  /** Bodies and the names of the models that each is for: a chat has a thread with each model. */
  requests() {
    const { names } = this.chosen;
    if (!names.length) return [];
    if (this.kind === "completion") return [{ names, body: { model: names.length === 1 ? names[0] : names, prompt: byId("prompt").value, ...this.shared() } }];
    const text = byId("message").value;
    const images = this.images.parts;
    const content = images.length ? [{ type: "text", text }, ...images] : text;
    return names.map((name) => this.chatWith(name, [{ role: "user", content }]));
  }

  /** said: what this model is told next, behind what was said before */
  chatWith(name, said) {
    const system = byId("system").value;
    const first = system ? [{ role: "system", content: system }] : [];
    const messages = [...first, ...(this.threads.get(name) ?? []), ...said];
    return { names: [name], said, body: { model: name, messages, ...this.shared() } };
  }

  shared() {
    const streams = byId("streams").checked ? { stream: true, stream_options: { include_usage: true } } : {};
    return { ...this.likelihoods(), ...this.tools.values(), ...this.parameters.values(), ...streams };
  }

  likelihoods() {
    if (!byId("likely").checked) return {};
    const number = Math.min(5, this.parameters.known.get(this.kind === "chat" ? "top_logprobs" : "logprobs").form.maximum ?? 5);
    return this.kind === "chat" ? { logprobs: true, top_logprobs: number } : { logprobs: number };
  }

  /** requests: what is sent, by default what stands in the form;  before: the answers that give way */
  async run(requests = this.requests(), before = [...byId("answers").children]) {
    this.drop();
    unmark(form);
    show("problem", null);
    if (!requests.length) return mark(form, { param: "model", message: NO_MODEL });
    const stopping = (this.stopping = new AbortController());
    this.isRunning(true);
    const startedAt = performance.now();
    const draft = this.draft();
    for (const each of before) each.remove();
    byId("legend").replaceChildren(...(byId("likely").checked ? [legend()] : []));
    if (matchMedia(NARROW).matches) byId("summary").scrollIntoView({ block: "start" });
    const cards = requests.map((request) => this.cardsOf(request));
    const outcomes = await Promise.all(requests.map((request, at) => this.one(request, cards[at], stopping.signal)));
    if (this.stopping !== stopping) return;
    this.stopping = null;
    this.isRunning(false);
    if (!cards.flat().some((card) => card.element.isConnected)) byId("answers").append(...before);
    this.remind(draft, cards.flat());
    this.sum(outcomes.filter(Boolean), (performance.now() - startedAt) / 1000, stopping.signal.aborted);
  }

  cardsOf({ names, body }) {
    const number = Number.isInteger(body.n) && body.n > 0 && body.n <= 16 ? body.n : 1;
    const cards = names.flatMap((name) =>
      Array.from({ length: number }, (_, at) => {
        const reply = body.messages && !at ? (results) => this.goOn(name, results, card) : null;
        const card = new Answer(number > 1 ? `${name} #${at + 1}` : name, { turns: body.messages, prompt: body.echo ? "" : body.prompt, reply });
        return card;
      }),
    );
    byId("answers").append(...cards.map((card) => card.element));
    return cards;
  }

  /** The usage of one request; null where it came to nothing. */
  async one({ names, said, body }, cards, signal) {
    const answerOf = (index) => {
      cards[index] ??= new Answer(`${names.at(-1)} #${index + 1}`);
      if (!cards[index].element.isConnected) byId("answers").append(cards[index].element);
      return cards[index];
    };
    try {
      const usage = await carryOut(said ? "chat" : "completion", body, { answerOf, signal });
      cards.forEach((card) => card.finish("stop"));
      if (said) this.remember(names[0], said, cards[0]);
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

  remember(name, said, card) {
    this.threads.set(name, [...(this.threads.get(name) ?? []), ...said, replyOf(card.words.data, card.calls)]);
    if (said[0].role !== "user" || byId("message").value !== textOf(said[0])) return;
    byId("message").value = "";
    this.images.clear();
  }

  /** Tells a model what the functions gave that it called. */
  goOn(name, results, card) {
    form.elements.kind.value = "chat";
    this.showKind();
    void this.run([this.chatWith(name, results)], [card.element]);
  }

  /** Ends what is being written, of which nothing is told or kept then. */
  drop() {
    this.stopping?.abort();
    this.stopping = null;
    this.isRunning(false);
    byId("summary").textContent = "";
  }

  /** Forgets every chat. */
  startOver() {
    this.drop();
    this.threads.clear();
    this.chat = Date.now();
    this.keep();
    byId("answers").replaceChildren(empty("Every model begins a new chat."));
    byId("message").focus();
  }

  isRunning(isOn) {
    const [from, to] = (isOn ? ["run", "stop"] : ["stop", "run"]).map(byId);
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
}
