/* Drawings one after another, with buttons, a slider and the arrow keys. */

const NS = "http://www.w3.org/2000/svg";
const ICONS = {
  play: "M4 2.5v11l9-5.5z", pause: "M3.5 2.5h3v11h-3zM9.5 2.5h3v11h-3z",
  back: "M11.5 2.5v11L4 8z M2.5 2.5h1.6v11H2.5z", next: "M4.5 2.5v11L12 8z M11.9 2.5h1.6v11h-1.6z",
};
const MILLISECONDS = 900;
const KEPT = /^(svg|g|path|line|rect|circle|ellipse|polygon|polyline|text|tspan|title|desc|defs|marker|div|span|p|ol|ul|li|b|i|em|strong|code|pre|br|table|caption|thead|tbody|tfoot|tr|th|td|figure|figcaption|style)$/i;

/* HTML of drawings and tables, and nothing that could run or load: the file that drew it
   may come from someone else. */
export function safe(html) {
  const made = new DOMParser().parseFromString(html, "text/html").body;
  for (const node of [...made.querySelectorAll("*")]) {
    if (!KEPT.test(node.localName)) {
      node.remove();
      continue;
    }
    for (const { name, value } of [...node.attributes])
      if (/^on|href|^src|^xmlns:/i.test(name) || /url\(\s*["']?(?!#)/i.test(value)) node.removeAttribute(name);
    if (node.localName === "style" && /url\(|@import/i.test(node.textContent)) node.remove();
  }
  return [...made.childNodes];
}

export class Steps {
  constructor(parent, title, frames, first = 0) {
    this.frames = frames.map(safe);
    this.box = document.createElement("figure");
    this.box.className = "xt-steps-box";
    this.stage = document.createElement("div");
    Object.assign(this.stage, { className: "xt-steps-stage", tabIndex: 0 });
    this.stage.setAttribute("role", "group");
    this.stage.setAttribute("aria-label", `${title}. Left and right arrow keys step, space plays and pauses.`);
    this.words = document.createElement("figcaption");
    this.words.textContent = title;
    this.box.append(this.words, this.stage);
    if (frames.length > 1) this.bar();
    this.stage.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) this.go(this.at + by);
      else if (event.key === " ") this.toggle();
      else if (event.key === "Home") this.go(0);
      else if (event.key === "End") this.go(this.frames.length - 1);
      else return;
      event.preventDefault();
    });
    parent.append(this.box);
    this.go(first);
  }

  bar() {
    const bar = document.createElement("div");
    bar.className = "xt-controls";
    const button = (label, picture, action) => {
      const made = document.createElement("button");
      Object.assign(made, { type: "button", title: label });
      made.setAttribute("aria-label", label);
      icon(made, picture);
      made.addEventListener("click", action);
      bar.append(made);
      return made;
    };
    this.play = button("Play", "play", () => this.toggle());
    this.play.className = "xt-play";
    button("Previous step", "back", () => this.go(this.at - 1));
    button("Next step", "next", () => this.go(this.at + 1));
    this.slider = document.createElement("input");
    Object.assign(this.slider, { type: "range", min: 0, max: this.frames.length - 1, value: 0 });
    this.slider.setAttribute("aria-label", "Step");
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.output = document.createElement("output");
    bar.append(this.slider, this.output);
    this.box.append(bar);
  }

  go(step, playing = false) {
    if (!playing) this.pause();
    const at = Math.min(Math.max(step, 0), this.frames.length - 1);
    if (at === this.at) return;
    this.at = at;
    this.stage.replaceChildren(...this.frames[this.at]);
    if (this.stage.querySelector("svg.xs")) this.timeline(this.stage.firstElementChild);
    if (!this.slider) return;
    const words = `step ${this.at + 1} of ${this.frames.length}`;
    this.slider.value = this.at;
    this.slider.setAttribute("aria-valuetext", words);
    this.output.textContent = words;
  }

  /* A schedule is zoomed and read out as on the other pages. */
  async timeline(box) {
    box.classList.add("xt-scroll", "xt-schedules");
    (await import("./schedules.mjs")).enhance(box);
  }

  toggle() {
    if (this.timer) return this.pause();
    if (!this.slider) return;
    if (this.at === this.frames.length - 1) this.go(0);
    this.timer = setInterval(() => {
      this.go(this.at + 1, true);
      if (this.at === this.frames.length - 1) this.pause();
    }, MILLISECONDS);
    this.name("Pause", "pause");
  }

  pause() {
    if (!this.timer) return;
    clearInterval(this.timer);
    this.timer = null;
    this.name("Play", "play");
  }

  name(label, picture) {
    icon(this.play, picture);
    this.play.title = label;
    this.play.setAttribute("aria-label", label);
  }

  remove() {
    this.pause();
    this.box.remove();
  }
}

function icon(button, name) {
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(NS, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  button.replaceChildren(svg);
}
