// Reads from /openapi.json what may be sent: nothing that the contract says is written down here again.

const NO_EFFECT = ["Another name of", "Not carried out", "Has no effect", "Carried out at"];

/** The parameters of a request's schema by name; names of others and what has no effect left out. */
export function parametersOf(schema) {
  const found = new Map();
  for (const [name, each] of Object.entries(schema.properties)) {
    if (!NO_EFFECT.some((words) => each.description?.startsWith(words))) found.set(name, parameter(name, each));
  }
  return found;
}

function parameter(name, schema) {
  const forms = (schema.anyOf ?? [schema]).filter((form) => form.type !== "null");
  const [about, words] = told(schema.description ?? "");
  const form = forms[0] ?? {};
  return { name, about, words, form, kind: kindOf(forms), default: schema.default, range: rangeOf(form) };
}

/** What it does, and what it must be. */
function told(description) {
  const at = description.indexOf(" Must be ");
  return at < 0 ? [description, ""] : [description.slice(0, at), description.slice(at + 9).replace(/\.$/, "")];
}

function kindOf(forms) {
  const [first] = forms;
  if (first?.enum?.every((value) => typeof value === "string")) return "choice";
  if (first?.type === "integer" || first?.type === "number" || first?.type === "boolean") return first.type;
  const isText = first?.type === "string" && !first.contentMediaType;
  if (isText && forms.some((form) => form.type === "array" && form.items?.type === "string")) return "texts";
  return isText && forms.length === 1 ? "text" : "json";
}

/** The bounds of a number in words; none where they are wide. */
export function rangeOf(form) {
  const low = form.minimum ?? form.exclusiveMinimum;
  const above = form.exclusiveMinimum !== undefined ? "above " : "";
  if (isWide(low) && isWide(form.maximum)) return "";
  if (isWide(form.maximum)) return `${above || "from "}${low}`;
  return isWide(low) ? `up to ${form.maximum}` : `${above}${low} to ${form.maximum}`;
}

const isWide = (bound) => bound === undefined || Math.abs(bound) > 1e9;

/** What is sent for what stands in a control; undefined sends nothing. */
export function valueOf(each, text) {
  if (text === "") return undefined;
  switch (each.kind) {
    case "integer":
    case "number":
      return Number.isFinite(Number(text)) ? Number(text) : text;
    case "boolean":
      return text === "true";
    case "texts":
      return text.split("\n").map(unescaped).filter((line) => line !== "");
    case "json":
      return parsed(text);
    default:
      return text;
  }
}

/** A line of a list of texts; `\n` and `\t` are written so. */
const unescaped = (line) => line.replace(/\\n/g, "\n").replace(/\\t/g, "\t");

/** The JSON of a text, else the text. */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text; // the service says what it must be
  }
}
