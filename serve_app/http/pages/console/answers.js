// One card per answer: its text as it comes, its tokens where they were asked for, how it ended.

import { button, byId, copier, make, on, seconds } from "./dom.js";
import { picture } from "./images.js";
import { markdown } from "./markdown.js";
import { asCall, textOf } from "./memory.js";
import { problem } from "./problems.js";
import { Tokens } from "./tokens.js";

const DRAW_MS = 250; // between two drawings of a text that grows
const LEAST_MS = 20; // what comes within less came at once, and tells no speed
const ENDS = { stop: "finished", length: "length reached", tool_calls: "calls a tool", abort: "was aborted", error: "failed" };

export class Answer {
  /** turns: of a chat, what was said before;  prompt: what a completion goes on from;  reply: takes results of calls */
  constructor(name, { turns = [], prompt = "", reply = null } = {}) {
    this.name = name;
    this.turns = turns;
    this.reply = reply;
    this.calls = [];
    this.isOver = false;
    this.startedAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.numPoints = 0;
    this.words = document.createTextNode("");
    this.text = make("span", { "aria-live": "polite", "aria-busy": "true", class: "text" }, this.words);
    const before = typeof prompt === "string" && prompt ? make("span", { class: "prompt muted", title: "The prompt" }, prompt) : null;
    this.written = make("div", { class: "written is-writing" }, before, this.text);
    this.rendered = make("div", { class: "rendered", hidden: true });
    this.tag = make("span", { class: "tag" }, "waiting");
    this.stats = make("span", {});
    this.tokens = new Tokens(name);
    const title = make("h3", {}, name);
    const copying = copier(`Copy what ${name} wrote`, () => this.said);
    this.rendering = button("Markdown", () => this.render(), `Show what ${name} wrote as Markdown`);
    this.rendering.ariaPressed = false;
    this.called = make("div", { class: "calls" });
    this.before = turns.map(shown);
    this.footer = make("footer", {}, this.stats, make("span", { class: "buttons" }, this.rendering, copying));
    this.element = make("article", { class: "panel answer", "aria-label": `Answer of ${name}` }, make("header", {}, title, this.tag), ...this.before, this.written, this.rendered, this.called, this.footer);
  }

  /** The text, and each call in a line behind it. */
  get said() {
    return [this.words.data, ...this.calls.map(asCall)].filter(Boolean).join("\n");
  }

  /** Shows the texts of the model as Markdown, or as they are again. */
  render(isOn = this.rendered.hidden) {
    this.drawing = clearTimeout(this.drawing);
    this.rendered.replaceChildren(...(isOn ? markdown(this.words.data) : []));
    this.rendered.hidden = !isOn;
    this.turns.forEach((turn, at) => turn.role === "assistant" && this.before[at].lastChild.replaceChildren(...(isOn ? markdown(textOf(turn)) : [textOf(turn)])));
    this.written.hidden = isOn;
    this.rendering.ariaPressed = isOn;
  }

  /** What came of a completion; offsets of tokens are characters of the whole text. */
  write(text, logprobs) {
    const points = [...text];
    const offsets = (logprobs?.text_offset ?? []).map((offset) => Math.min(points.length, Math.max(0, offset - this.numPoints)));
    this.begin(text);
    const before = points.slice(0, offsets[0] ?? points.length).join("");
    if (before && this.tokens.tokens.length) this.tokens.extend(before);
    offsets.forEach((offset, at) => {
      const top = Object.entries(logprobs.top_logprobs?.[at] ?? {}).sort((one, two) => two[1] - one[1]);
      const shown = points.slice(offset, offsets[at + 1] ?? points.length).join("");
      this.addToken({ text: logprobs.tokens[at], shown, logprob: logprobs.token_logprobs[at], top });
    });
    this.numPoints += points.length;
  }

  /** What came of a chat; a token's bytes may be a part of a character. */
  say(text, logprobs) {
    this.begin(text);
    this.decoder ??= new TextDecoder();
    this.unassigned = (this.unassigned ?? "") + text;
    const entries = logprobs?.content ?? [];
    for (const entry of entries) {
      const own = entry.bytes ? this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
      const shown = this.unassigned.startsWith(own) ? own : ""; // what ends a turn is a token, and no text
      this.unassigned = this.unassigned.slice(shown.length);
      const top = (entry.top_logprobs ?? []).map((each) => [each.token, each.logprob]);
      this.addToken({ text: entry.token, shown, logprob: entry.logprob, top });
    }
  }

  /** What came of a call; its name and its arguments may come in pieces. */
  call({ index, id, function: { name = "", arguments: written = "" } }) {
    this.begin("");
    if (!this.calls[index]) {
      this.calls[index] = { id, type: "function", function: { name: "", arguments: "" } };
      this.called.append(make("pre", { tabindex: 0 }));
    }
    const call = this.calls[index];
    call.function.name += name;
    call.function.arguments += written;
    this.called.children[index].textContent = asCall(call);
  }

  /** Asks the person what each function gave. */
  askForResults() {
    const fields = this.calls.map((call) => make("label", {}, `What ${call.function.name} gave`, make("textarea", { rows: 2 })));
    const send = make("button", { type: "submit", class: "small" }, "Send results");
    const form = make("form", {}, ...fields, send);
    on(form, "submit", () => this.reply(this.calls.map(({ id }, at) => ({ role: "tool", tool_call_id: id, content: fields[at].querySelector("textarea").value }))));
    this.called.append(form);
  }

  begin(text) {
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    if (!this.isOver) this.tag.textContent = "writing";
    this.words.appendData(text);
    if (!this.rendered.hidden) this.drawing ??= setTimeout(() => this.render(true), DRAW_MS);
  }

  addToken(token) {
    if (!this.tokens.tokens.length) {
      this.text.classList.add("unseen");
      this.written.append(this.tokens.element);
      this.footer.before(this.tokens.inspector);
    }
    this.tokens.add(token);
  }

  finish(reason) {
    if (this.isOver) return;
    this.end(ENDS[reason] ?? reason, reason === "error" ? "bad" : "good");
    if (this.reply && this.calls.length) this.askForResults();
    const number = this.tokens.tokens.length;
    const facts = [];
    const decoding = this.lastAt - this.firstAt;
    if (number) facts.push(`${number} ${number === 1 ? "token" : "tokens"}`);
    if (this.firstAt) facts.push(`first after ${seconds((this.firstAt - this.startedAt) / 1000)}`);
    if (number > 1 && decoding > LEAST_MS) facts.push(`${((number - 1) / decoding * 1000).toFixed(0)} tokens/s`);
    this.stats.textContent = facts.join(" · ");
  }

  /** Where tokens do not add up to what was said, as those of calls, the text alone is shown. */
  showText() {
    this.text.classList.remove("unseen");
    this.tokens.element.remove();
    this.tokens.inspector.remove();
  }

  stop() {
    if (!this.isOver) this.end("stopped by you", "");
  }

  fail(error) {
    if (this.isOver) return;
    this.end("broke off", "bad");
    this.footer.before(problem(error));
  }

  end(words, kind) {
    this.isOver = true;
    this.tag.textContent = words;
    this.tag.className = `tag ${kind}`;
    this.text.ariaBusy = false;
    this.written.classList.remove("is-writing");
    const isBare = !this.words.data && this.calls.length > 0;
    this.render(!isBare && (byId("markdown").checked || !this.rendered.hidden));
    this.written.hidden ||= isBare;
    if (!this.tokens.tokens.length) return;
    if (this.tokens.text === this.words.data) this.tokens.lookAtLeastLikely();
    else this.showText();
  }
}

/** A turn of a chat as it was sent. */
function shown(turn) {
  const images = Array.isArray(turn.content) ? turn.content.filter((part) => part.image_url) : [];
  return make("div", { class: "turn" }, make("b", {}, turn.role), ...images.map((part, at) => picture(part.image_url.url, `Image ${at + 1}`)), make("div", { class: "rendered" }, textOf(turn)));
}
