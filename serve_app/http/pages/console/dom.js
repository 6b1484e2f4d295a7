// Makes and finds elements. Text is only ever set as text, so nothing that a model or a server wrote becomes markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (`class`, `data-…`, properties as booleans), handlers (functions) and children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (tag === "button") element.type = "button";
  for (const [name, value] of Object.entries(attributes)) {
    if ((value ?? false) === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => (child ?? null) !== null));
  return element;
}

export function shape(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}

/** A table in a box that scrolls sideways by itself; a column is [title, cell of a row, is a number]. */
export function table(caption, columns, rows) {
  const head = make("tr", {}, ...columns.map(([title, , number]) => make("th", { scope: "col", class: number && "number" }, title || make("span", { class: "unseen" }, "actions"))));
  const body = rows.map((row) =>
    make("tr", {}, ...columns.map(([title, cell, number], at) => {
      const content = cell(row);
      return at ? make("td", { class: number && "number", "data-title": title }, content) : make("th", { scope: "row" }, content);
    })),
  );
  const made = make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, head), make("tbody", {}, ...body));
  return make("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": caption }, made);
}

export const empty = (text) => make("p", { class: "empty" }, text);

const DATES = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "short" });

/** A moment of the Unix clock; a dash where there is none. */
export const when = (seconds) => (seconds ? DATES.format(seconds * 1000) : "–");

export function count(number) {
  return Number(number).toLocaleString("en", { maximumFractionDigits: 0 });
}

export function seconds(number) {
  if (number < 1) return `${Math.round(number * 1000)} ms`;
  return number < 120 ? `${number.toFixed(1)} s` : `${(number / 60).toFixed(1)} min`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = number < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(number) / 10));
  return `${(number / 1024 ** at).toFixed(at && number / 1024 ** at < 10 ? 1 : 0)} ${units[at]}`;
}

/** A button that asks once more before it does anything. consequence: what the person is told then */
export function removal(label, word, consequence, act) {
  const button = make("button", { class: "small bad", "aria-label": label }, word);
  const say = (sure) => {
    button.dataset.sure = sure;
    button.textContent = sure ? `${consequence}: press again` : word;
    button.ariaLabel = sure ? `${label}. ${consequence}: press again` : label;
  };
  on(button, "blur", () => say(""));
  on(button, "click", () => (button.dataset.sure ? void act() : say("yes")));
  return button;
}

/** Hands a text, or the content of a response, to the person as a file. */
export function save(name, content, type = "text/plain") {
  const link = make("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Hears what happens to an element; a form that is submitted does not leave the page. */
export function on(id, kind, act) {
  (id.nodeType ? id : byId(id)).addEventListener(kind, (event) => (kind === "submit" && event.preventDefault(), void act(event)));
}

/** A small button. label: what it is called where its word is not enough */
export const button = (word, act, label) => make("button", { class: "small", "aria-label": label, click: act }, word);

/** A button that copies a text, and says so for a moment. label: what it copies;  text: gives it */
export const copier = (label, text) => button("Copy", (event) => copy(text(), event.target), label);

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it and press Ctrl + C";
  }
  setTimeout(() => (button.textContent = before), 1600);
}
