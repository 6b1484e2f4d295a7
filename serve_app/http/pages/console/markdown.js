// Shows a text's Markdown as elements: headings, lists, tables, quotes, code, emphasis. All else stays text.

import { make } from "./dom.js";

// Looks no further for the end of each mark: many that nothing ends would take the square of a text.
const INLINE = /(`+)(.{1,999}?)\1|\*\*(.{1,999}?)\*\*(?!\*)|__(.{1,999}?)__|~~(.{1,999}?)~~|\*([^\s*](?:.{0,999}?[^\s*])?)\*/gs;
const FENCE = /^ {0,3}(```+|~~~+)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])\s+(.*)$/;
const ROW = /^ *\|/;
const UNDER_HEAD = /^\|?( *:?-+:? *\|)* *:?-+:? *\|?$/;
const CELL_END = /(?<!\\)\|/;
const DEEPEST = 8;
/** Of quotes and lists within each other; what is deeper is shown as text. */

/** The elements of a text. Links and images stay text: nobody is led anywhere by what a model wrote. */
export function markdown(text, depth = 0) {
  if (depth > DEEPEST) return [text];
  const lines = text.split("\n");
  const made = [];
  while (lines.length) made.push(...block(lines, depth));
  return made;
}

function block(lines, depth) {
  const line = lines.shift();
  if (!line.trim()) return [];
  const fence = FENCE.exec(line)?.[1];
  if (fence) {
    const code = taken(lines, (each) => !each.trim().startsWith(fence));
    lines.shift(); // the end of it
    return [make("pre", { tabindex: 0 }, make("code", {}, code.join("\n")))];
  }
  const heading = HEADING.exec(line);
  if (heading) return [make(`h${Math.max(4, heading[1].length)}`, {}, ...inline(heading[2]))];
  if (RULE.test(line)) return [make("hr")];
  if (QUOTE.test(line)) {
    const quoted = [line, ...taken(lines, (each) => QUOTE.test(each))].map((each) => each.replace(QUOTE, ""));
    return [make("blockquote", {}, ...markdown(quoted.join("\n"), depth + 1))];
  }
  if (ITEM.test(line)) return [list(line, lines, depth)];
  if (line.includes("|") && UNDER_HEAD.test(lines[0]?.trim() ?? "")) return [table(line, lines)];
  return [make("p", {}, ...inline([line, ...taken(lines, isParagraph)].join("\n")))];
}

const isParagraph = (line) => line.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM, ROW].some((begins) => begins.test(line));

/** Items that begin where the first does; what stands further in, also behind a blank line, belongs to the item before it. */
function list(first, lines, depth) {
  const [, { length: indent }, , number] = ITEM.exec(first);
  const depthOf = (line) => line.search(/\S/);
  const isNext = (item) => item && item[1].length <= indent + 1;
  const belongs = (line) => {
    const item = ITEM.exec(line);
    return isNext(item) ? depthOf(line) >= indent && !item[3] === !number : depthOf(line) > indent;
  };
  const items = [];
  for (const line of [first, ...taken(lines, (each, at) => belongs(each.trim() ? each : (lines[at + 1] ?? "")))]) {
    const item = ITEM.exec(line);
    if (isNext(item)) items.push([item[4]]);
    else items.at(-1).push(line);
  }
  const made = items.map(([head, ...within]) => {
    const [begin, ...rest] = markdown([head, ...unindented(within)].join("\n"), depth + 1);
    return make("li", {}, ...(begin?.tagName === "P" ? begin.childNodes : [begin]), ...rest);
  });
  return number ? make("ol", { start: number }, ...made) : make("ul", {}, ...made);
}

function unindented(lines) {
  const least = lines.reduce((least, line) => (line.trim() ? Math.min(least, line.search(/\S/)) : least), Infinity);
  return lines.map((line) => line.slice(least));
}

function table(head, lines) {
  lines.shift();
  const rows = taken(lines, (line) => line.includes("|")).map(cellsOf);
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, ...inline(cell))));
  return make("div", { class: "scroller", tabindex: 0 }, make("table", {}, make("thead", {}, row(cellsOf(head), "th")), make("tbody", {}, ...rows.map((cells) => row(cells, "td")))));
}

const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split(CELL_END).map((cell) => cell.trim().replaceAll("\\|", "|"));

/** Takes lines off the front while they belong. */
function taken(lines, belongs) {
  const end = lines.findIndex((line, at) => !belongs(line, at));
  return lines.splice(0, end < 0 ? lines.length : end);
}

function inline(text) {
  const made = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, bold, alsoBold, struck, slanted] = found;
    const element = code ? make("code", {}, code) : make(slanted ? "em" : struck ? "del" : "strong", {}, ...inline(slanted ?? struck ?? bold ?? alsoBold));
    made.push(text.slice(at, found.index), element);
    at = found.index + whole.length;
  }
  return [...made, text.slice(at)];
}
