// Shows a text's Markdown as elements: headings, lists, quotes, code, emphasis. All else stays the text that it is.

import { make } from "./dom.js";

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^\s*](?:.*?[^\s*])?)\*/s;
const FENCE = /^ {0,3}(```+|~~~+)/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;

/** The elements of a text. Links and images stay text: nobody is led anywhere by what a model wrote. */
export function markdown(text) {
  const lines = text.split("\n");
  const made = [];
  while (lines.length) made.push(...block(lines));
  return made;
}

function block(lines) {
  const line = lines.shift();
  const fence = FENCE.exec(line)?.[1];
  if (fence) return [make("pre", { tabindex: 0 }, make("code", {}, taken(lines, (each) => !each.trim().startsWith(fence), { endToo: true }).join("\n")))];
  const heading = /^(#{1,6})\s+(.*)$/.exec(line);
  if (heading) return [make(`h${Math.max(4, heading[1].length)}`, {}, ...inline(heading[2]))];
  if (!line.trim()) return [];
  if (/^>\s?/.test(line)) return [make("blockquote", {}, ...markdown([line, ...taken(lines, (each) => each.startsWith(">"))].map((each) => each.replace(/^>\s?/, "")).join("\n")))];
  const item = ITEM.exec(line);
  if (item) {
    const items = [line, ...taken(lines, (each) => ITEM.test(each))].map((each) => make("li", {}, ...inline(ITEM.exec(each)[2])));
    return [item[1] ? make("ol", { start: item[1] }, ...items) : make("ul", {}, ...items)];
  }
  const isParagraph = (each) => each.trim() && !FENCE.test(each) && !ITEM.test(each) && !/^(#{1,6}\s|>)/.test(each);
  return [make("p", {}, ...inline([line, ...taken(lines, isParagraph)].join("\n")))];
}

/** Takes lines off the front while they belong; with `endToo` also the one that ends them. */
function taken(lines, belongs, { endToo = false } = {}) {
  const found = [];
  while (lines.length && belongs(lines[0])) found.push(lines.shift());
  if (endToo) lines.shift();
  return found;
}

function inline(text) {
  const found = INLINE.exec(text);
  if (!found) return [text];
  const [whole, , code, bold, alsoBold, slanted] = found;
  const element = code ? make("code", {}, code) : slanted ? make("em", {}, ...inline(slanted)) : make("strong", {}, ...inline(bold ?? alsoBold));
  return [text.slice(0, found.index), element, ...inline(text.slice(found.index + whole.length))];
}
