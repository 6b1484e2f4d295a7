// One card per answer: its text as it comes, its tokens where they were asked for, how it ended.

import { copy, make, seconds } from "./dom.js";
import { markdown } from "./markdown.js";
import { problem } from "./problems.js";
import { Tokens } from "./tokens.js";

const ENDS = { stop: "finished", length: "length reached", tool_calls: "calls a tool", abort: "was aborted", error: "failed" };

export class Answer {
  /** turns: of a chat, what was said before;  prompt: what a completion goes on from */
  constructor(name, { turns = [], prompt = "" } = {}) {
    this.name = name;
    this.turns = turns;
    this.isOver = false;
    this.startedAt = performance.now();
    this.firstAt = null;
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
    const copying = make("button", { type: "button", class: "small", "aria-label": `Copy what ${name} wrote` }, "Copy");
    copying.addEventListener("click", () => copy(this.words.data, copying));
    const said = turns.map((turn) => make("div", { class: "turn" }, make("b", {}, turn.role), turn.content));
    const rendering = make("button", { type: "button", class: "small", "aria-pressed": "false", "aria-label": `Show what ${name} wrote as Markdown` }, "Markdown");
    rendering.addEventListener("click", () => this.render(rendering));
    this.footer = make("footer", {}, this.stats, make("span", { class: "buttons" }, rendering, copying));
    this.element = make("article", { class: "panel answer", "aria-label": `Answer of ${name}` }, make("header", {}, title, this.tag), ...said, this.written, this.rendered, this.footer);
  }

  /** Shows the text as Markdown, or as it is again. */
  render(button) {
    const isOn = this.rendered.hidden;
    this.rendered.replaceChildren(...(isOn ? markdown(this.words.data) : []));
    this.rendered.hidden = !isOn;
    this.written.hidden = isOn;
    button.setAttribute("aria-pressed", String(isOn));
  }

  /** What came of a completion; offsets of tokens are characters of the whole text. */
  write(text, logprobs) {
    const points = [...text];
    const offsets = (logprobs?.text_offset ?? []).map((offset) => Math.min(points.length, Math.max(0, offset - this.numPoints)));
    this.begin(text);
    this.belongsToLast(points.slice(0, offsets[0] ?? points.length).join(""));
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

  begin(text) {
    this.firstAt ??= performance.now();
    if (!this.isOver) this.tag.textContent = "writing";
    this.words.appendData(text);
  }

  addToken(token) {
    if (!this.tokens.tokens.length) {
      this.text.classList.add("unseen");
      this.written.append(this.tokens.element);
      this.footer.before(this.tokens.inspector);
    }
    this.tokens.add(token);
  }

  belongsToLast(text) {
    if (text && this.tokens.tokens.length) this.tokens.extend(text);
  }

  finish(reason) {
    if (this.isOver) return;
    this.end(ENDS[reason] ?? reason, reason === "error" ? "bad" : "good");
    const number = this.tokens.tokens.length;
    const facts = [];
    const decoding = performance.now() - this.firstAt;
    if (number) facts.push(`${number} ${number === 1 ? "token" : "tokens"}`);
    if (this.firstAt) facts.push(`first after ${seconds((this.firstAt - this.startedAt) / 1000)}`);
    if (number > 1 && decoding > 0) facts.push(`${((number - 1) / decoding * 1000).toFixed(0)} tokens/s`);
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
    this.text.setAttribute("aria-busy", "false");
    this.written.classList.remove("is-writing");
    if (!this.tokens.tokens.length) return;
    if (this.tokens.text === this.words.data) this.tokens.lookAtLeastLikely();
    else this.showText();
  }
}
