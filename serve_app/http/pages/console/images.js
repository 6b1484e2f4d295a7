// Images that go with a message of a chat: chosen, dropped or pasted. They are sent as data addresses.

import { byId, make, on } from "./dom.js";
import { show } from "./problems.js";

const HEIGHT = 48;

export class Images {
  constructor() {
    this.chosen = [];
    const [input, message] = [byId("images"), byId("message")];
    on(input, "change", async () => (await this.take(input.files), (input.value = "")));
    on(message, "paste", (event) => this.takeFrom(event, event.clipboardData));
    on(message, "dragover", (event) => this.isOffered && event.dataTransfer.types.includes("Files") && event.preventDefault());
    on(message, "drop", (event) => this.takeFrom(event, event.dataTransfer));
  }

  /** Whether a chosen model takes any. */
  get isOffered() {
    return !byId("images").closest(".field").hidden;
  }

  /** Parts of a message, one for each image. */
  get parts() {
    return this.isOffered ? this.chosen.map(({ url }) => ({ type: "image_url", image_url: { url } })) : [];
  }

  clear() {
    this.chosen = [];
    this.show();
  }

  takeFrom(event, given) {
    if (!this.isOffered || !given?.files.length) return;
    event.preventDefault();
    void this.take(given.files);
  }

  async take(files) {
    try {
      const read = await Promise.all([...files].map(async (file) => ({ name: file.name, url: await asAddress(file) })));
      this.chosen = [...this.chosen, ...read];
      this.show();
    } catch (error) {
      show("problem", error);
    }
  }

  show() {
    byId("image-list").replaceChildren(
      ...this.chosen.map((each) => {
        const remove = () => {
          this.chosen = this.chosen.filter((other) => other !== each);
          this.show();
          byId("images").focus();
        };
        return make("li", {}, picture(each.url, each.name), make("button", { class: "remove", "aria-label": `Remove ${each.name}`, click: remove }, "×"));
      }),
    );
  }
}

function asAddress(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`)));
    reader.readAsDataURL(file);
  });
}

/** An image of a data address, drawn small: the policy lets the page load none. */
export function picture(url, name) {
  const canvas = make("canvas", { class: "picture", role: "img", "aria-label": name, title: name, width: HEIGHT, height: HEIGHT });
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (letter) => letter.charCodeAt(0));
  const draw = (bitmap) => {
    canvas.width = Math.max(1, Math.round((HEIGHT * bitmap.width) / bitmap.height));
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, HEIGHT);
  };
  createImageBitmap(new Blob([bytes])).then(draw, () => canvas.replaceWith(name)); // the service says what is wrong with it
  return canvas;
}
