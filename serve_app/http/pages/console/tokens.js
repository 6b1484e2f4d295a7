// The tokens of an answer, shaded by how likely they were; one is looked at by pointer or by arrow keys.

import { make } from "./dom.js";

const STEPS = [0.9, 0.6, 0.3, 0.1, 0.03];
const LEGEND = [...STEPS.map((step) => `over ${100 * step} %`), "less"];

const HINT = "Point at a token, or move through them by the arrow keys, to see what else could have stood there.";

/** The class of a probability: p0 is sure, p5 a surprise. */
const shadeOf = (probability) => `p${STEPS.filter((step) => probability < step).length}`;

const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100 %" : share >= 10 ? `${share.toFixed(1)} %` : `${share.toPrecision(2)} %`;
};

/** A token's text with what cannot be seen made visible. */
const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣") || "∅";

export class Tokens {
  /** name: of whose tokens they are */
  constructor(name) {
    this.tokens = [];
    this.at = -1;
    this.element = make("div", {
      role: "listbox", tabindex: 0, "aria-orientation": "horizontal", "aria-label": `Tokens of ${name}`,
      keydown: (event) => this.move(event),
      focus: () => this.at < 0 && this.look(0),
      pointerover: (event) => event.target.dataset.at && this.look(Number(event.target.dataset.at)),
    });
    this.inspector = make("div", { class: "inspector" }, make("p", { class: "muted" }, HINT));
  }

  /** token: {text, shown, logprob, top: [[text, logprob], …]}; `shown` is what of the answer it is */
  add(token) {
    const shade = token.logprob === null ? "" : shadeOf(Math.exp(token.logprob));
    const silent = token.shown === "";
    const id = `token-${(Tokens.count = (Tokens.count ?? 0) + 1)}`;
    const label = token.logprob === null ? visible(token.text) : `${visible(token.text)}, ${percent(token.logprob)}`;
    const attributes = { id, role: "option", class: `token ${shade} ${silent ? "silent" : ""}`.trim(), "data-at": this.tokens.length, "aria-label": label, "aria-selected": "false" };
    const element = make("span", attributes, silent ? "▪" : token.shown);
    this.tokens.push({ ...token, element });
    this.element.append(element);
  }

  /** What is shown of the last token grew: a character came in several. */
  extend(text) {
    const last = this.tokens.at(-1);
    last.shown += text;
    last.element.textContent = last.shown;
  }

  get text() {
    return this.tokens.map((token) => token.shown).join("");
  }

  /** The place where another text was likeliest. */
  lookAtLeastLikely() {
    const known = this.tokens.map((token) => token.logprob ?? 0);
    this.look(known.indexOf(Math.min(...known)));
  }

  move(event) {
    const to = { ArrowRight: this.at + 1, ArrowDown: this.at + 1, ArrowLeft: this.at - 1, ArrowUp: this.at - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (to === undefined || !this.tokens.length) return;
    event.preventDefault();
    this.look(Math.max(0, Math.min(this.tokens.length - 1, to)));
  }

  look(at) {
    this.tokens[this.at]?.element.setAttribute("aria-selected", "false");
    this.at = at;
    const token = this.tokens[at];
    token.element.ariaSelected = true;
    this.element.setAttribute("aria-activedescendant", token.element.id);
    this.inspector.replaceChildren(heading(token), list(token));
  }
}

function heading(token) {
  const how = token.logprob === null ? "nothing predicts it" : `${percent(token.logprob)}, logprob ${token.logprob.toFixed(3)}`;
  return make("p", {}, make("code", {}, visible(token.text)), ` ${how}`);
}

function list(token) {
  const isListed = token.top.some(([text]) => text === token.text);
  const drawn = token.logprob === null || isListed ? [] : [[token.text, token.logprob]];
  const rows = [...token.top, ...drawn].map(([text, logprob]) =>
    make(
      "li",
      { class: text === token.text && "drawn" },
      make("span", { class: "piece" }, visible(text)),
      make("progress", { class: "gauge", max: 1, value: Math.exp(logprob), "aria-hidden": "true" }),
      make("span", { class: "number" }, percent(logprob)),
    ),
  );
  return make("ol", { "aria-label": "What was likely here" }, ...rows);
}

/** What the shades mean. */
export function legend() {
  const samples = LEGEND.map((text, at) => make("span", { class: `token p${at}` }, text));
  return make("p", { class: "legend muted" }, "How likely each token was:", ...samples);
}
