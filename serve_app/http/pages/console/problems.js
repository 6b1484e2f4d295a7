// Shows whole what the service refused, and marks the field that it is about.

import { byId, make } from "./dom.js";
import { Lost } from "./service.js";

/** A box with the message and every fact that came with it. */
export function problem(error) {
  const facts = Object.entries(error.facts ?? {}).filter(([, value]) => value !== undefined && value !== null);
  const title = error instanceof Lost ? "The service was lost" : error.facts ? "The service refused this" : "Something went wrong";
  return make(
    "div",
    { class: "problem" },
    make("strong", {}, title),
    make("p", {}, error.message),
    facts.length ? make("p", { class: "facts" }, facts.map(([name, value]) => `${name}: ${value}`).join(" · ")) : null,
  );
}

/** Shows an error in a place of its own; null clears it. */
export function show(id, error) {
  byId(id).replaceChildren(...(error ? [problem(error)] : []));
}

/** Carries out what may be refused, and shows why it was: in the form that was sent, else in a place of its own. No button of that section is pressed twice. */
export const attemptIn = (id) => async (act) => {
  const focused = document.activeElement;
  const place = focused.closest("form") ?? byId(id);
  const buttons = byId(id).closest("section").querySelectorAll("button:enabled");
  for (const each of [byId(id), place]) each.querySelector(".problem")?.remove();
  for (const each of buttons) each.disabled = true;
  try {
    await act();
  } catch (error) {
    const box = problem(error);
    box.role = place.role ? null : "alert";
    place.append(box);
    box.scrollIntoView({ block: "nearest" });
  }
  for (const each of buttons) each.disabled = false;
  if ([document.body, byId("main")].includes(document.activeElement)) (focused.isConnected ? focused : byId("main")).focus({ preventScroll: true });
};

/** Marks the field of the parameter at fault within a form, and takes the person there. */
export function mark(form, error) {
  const name = /^[A-Za-z_]+/.exec(error.param ?? "")?.[0];
  const field = name && [...form.querySelectorAll("[data-parameter]")].find((each) => each.dataset.parameter === name);
  if (!field || field.hidden) return;
  const id = `fault-${name}`;
  field.classList.add("marked");
  const folded = field.closest("details");
  if (folded) folded.open = true;
  field.append(make("p", { class: "fault", id }, error.message));
  const control = field.querySelector("input, select, textarea");
  control.ariaInvalid = true;
  control.dataset.described = control.getAttribute("aria-describedby") ?? "";
  control.setAttribute("aria-describedby", `${control.dataset.described} ${id}`.trim());
  control.focus();
  field.scrollIntoView({ block: "nearest" });
}

export function unmark(form) {
  for (const field of form.querySelectorAll(".marked")) {
    field.classList.remove("marked");
    field.querySelector(".fault")?.remove();
    const control = field.querySelector("[aria-invalid]");
    control?.removeAttribute("aria-invalid");
    control?.setAttribute("aria-describedby", control.dataset.described);
  }
}
