/* Timelines of schedules (xtrain.schedules.draw): zoom and pan of time, one legend, and an
   action's name and times where it is pointed at, tapped or reached with the arrow keys. */

const LEFT = 58, RIGHT = 12, LETTER = 6.2;
const NAMES = {
  F: "forward", B: "gradient of the input", W: "gradient of the weights",
  BW: "backward (both)", REDUCE: "reduction of gradients",
};
const SVG = "http://www.w3.org/2000/svg";
const round = (value) => Number(value.toPrecision(4));

function make(tag, attributes, parent, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  parent.append(node);
  return node;
}

function button(words, label, parent) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", textContent: words, title: label });
  made.setAttribute("aria-label", label);
  parent.append(made);
  return made;
}

/* What one drawing holds: its cells with the place and width they were drawn with. */
class Drawing {
  constructor(svg) {
    this.svg = svg;
    const ticks = [...svg.querySelectorAll("text.t")];
    const [x, time] = [ticks.at(-1).getAttribute("x"), ticks.at(-1).textContent].map(Number);
    const { span } = svg.closest(".xt-scroll").dataset; // where a step may take less than 1
    this.axis = Number(ticks[0].getAttribute("y"));
    this.width = svg.viewBox.baseVal.width;
    this.scale = span ? (this.width - LEFT - RIGHT) / span : (x - LEFT) / time;
    this.height = svg.viewBox.baseVal.height;
    this.bars = [...svg.querySelectorAll("rect")].map((rect) => ({
      rect, x: Number(rect.getAttribute("x")), wide: Number(rect.getAttribute("width")),
      y: Number(rect.getAttribute("y")), high: Number(rect.getAttribute("height")),
      title: rect.querySelector("title")?.textContent,
    }));
    this.cells = this.bars.filter((bar) => bar.title !== undefined);
    const labels = new Set(svg.querySelectorAll("text:is(.n, .p)"));
    for (const cell of this.cells) {
      const after = cell.rect.nextElementSibling;
      cell.number = labels.has(after) ? after.textContent : cell.title.match(/\d+$/)?.[0] ?? "";
      cell.pale = (cell.rect.style.fillOpacity || 1) < 0.8;
      cell.rect.querySelector("title").remove();
    }
    const names = [...svg.querySelectorAll("text.l")];
    const tops = names.map((name) => Number(name.getAttribute("y")));
    for (const cell of this.cells) cell.rank = tops.filter((top) => top <= cell.y + 17.01).length - 1;
    this.names = make("g", { class: "names" }, svg);
    make("rect", { class: "under", x: 0, y: 0, width: LEFT - 6, height: this.height }, this.names);
    this.names.append(...names);
  }

  zoom(z) {
    const at = (x) => (LEFT + (x - LEFT) * z).toFixed(1);
    this.svg.querySelectorAll("text:is(.n, .p, .t)").forEach((text) => text.remove());
    for (const { rect, x, wide } of this.bars) {
      rect.setAttribute("x", at(x));
      rect.setAttribute("width", (wide * z).toFixed(1));
    }
    const texts = document.createDocumentFragment();
    for (const { x, y, wide, high, number, pale } of this.cells) {
      if (!number || wide * z <= LETTER * number.length + 1.5 || high < 12) continue;
      make("text", { class: pale ? "p" : "n", x: at(x + wide / 2), y: y + high / 2 + 3.9 }, texts, number);
    }
    const span = (this.width - LEFT - RIGHT) / this.scale;
    let step = 10 ** Math.floor(Math.log10(34 / (this.scale * z)));
    for (const more of [2, 2.5, 2]) if (step * this.scale * z < 34) step *= more;
    for (let time = 0; time <= span + 1e-9; time += step)
      make("text", { class: "t", x: at(LEFT + time * this.scale), y: this.axis }, texts, String(round(time)));
    this.svg.insertBefore(texts, this.names);
    const width = Math.ceil(LEFT + (this.width - LEFT - RIGHT) * z + RIGHT);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", this.height);
  }

  /* Places have tenths of a pixel: a time to the digits that these tell. */
  rounded(time) {
    const unit = 10 ** Math.ceil(Math.log10(0.2 / this.scale)) / 2;
    return Math.round(time / unit) * unit;
  }

  words({ title, x, wide, rank }) {
    const [, stage, kind, micro] = title.match(/^(\d+)([A-Z]+)(\d+)$/) ?? [];
    const what = kind === "REDUCE" ? `${NAMES.REDUCE} of stage ${stage}`
      : NAMES[kind] ? `${NAMES[kind]} of micro-batch ${micro} on stage ${stage}` : title;
    const [begin, end] = [x - LEFT, x - LEFT + wide].map((place) => round(this.rounded(place / this.scale)));
    return `rank ${rank}, ${begin} to ${end}: ${what}`;
  }
}

/* The legends of drawings go: one stands below all of them. */
function withoutLegends(svgs) {
  for (const svg of svgs) {
    for (const words of svg.querySelectorAll("text.g")) {
      words.previousElementSibling.remove();
      words.remove();
    }
    const height = Number(svg.querySelector("text.t").getAttribute("y")) + 8;
    svg.setAttribute("viewBox", `0 0 ${svg.viewBox.baseVal.width} ${height}`);
    svg.setAttribute("height", height);
    svg.closest(".xt-part")?.style.setProperty("--xt-height", `${height}px`);
  }
}

class Frame {
  constructor(frame) {
    this.frame = frame;
    this.svgs = [...frame.querySelectorAll("svg.xs")];
    this.z = 1;
    withoutLegends(this.svgs);
    frame.setAttribute("role", "group");
    frame.setAttribute("aria-label", "Timeline. Arrow keys go from action to action, plus and minus zoom.");
    this.bar();
    this.listen();
    if (this.fit > 0.7 && this.fit < 1) this.zoom(this.fit);
  }

  /* What is needed once a reader comes near with a pointer or a key. */
  wake() {
    if (this.drawings) return;
    this.drawings = this.svgs.map((svg) => new Drawing(svg));
    this.cells = this.drawings.flatMap((drawing) => drawing.cells.map((cell) => Object.assign(cell, { drawing })));
    this.of = new Map(this.cells.map((cell) => [cell.rect, cell]));
  }

  bar() {
    const bar = document.createElement("div");
    bar.className = "xt-schedule-bar";
    const legend = document.createElement("ul");
    const titles = [...this.frame.querySelectorAll("svg.xs rect > title")];
    const kinds = new Set(titles.map((title) => title.textContent.match(/[A-Z]+/)?.[0]));
    const key = (style, words) => {
      const item = document.createElement("li");
      const box = document.createElement("i");
      box.style.cssText = style;
      item.append(box, words);
      legend.append(item);
    };
    for (const kind of Object.keys(NAMES))
      if (kinds.has(kind)) key(`background: var(--${kind.toLowerCase()})`, NAMES[kind]);
    if (this.frame.querySelector("rect[style*='opacity:0.']"))
      key("background: var(--xt-faint); opacity: 0.55", "paler: a later chunk, or the other direction");
    legend.className = "xs";
    const zooms = document.createElement("div");
    zooms.className = "xt-zooms";
    button("−", "Zoom out", zooms).onclick = () => this.zoom(this.z / 1.5);
    button("+", "Zoom in", zooms).onclick = () => this.zoom(this.z * 1.5);
    button("Fit", "Fit the whole time into the frame", zooms).onclick = () => this.zoom(0);
    this.output = document.createElement("output");
    this.output.textContent = "Point at an action, tap it, or use the arrow keys.";
    bar.append(legend, zooms, this.output);
    this.frame.after(bar);
  }

  get fit() {
    this.widest ??= Math.max(...this.svgs.map((svg) => svg.viewBox.baseVal.width));
    const widest = this.widest;
    const { paddingLeft, paddingRight } = getComputedStyle(this.frame);
    const room = this.frame.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
    return Math.min(1, (room - LEFT - RIGHT) / (widest - LEFT - RIGHT));
  }

  /* The time in the middle, or at `x` pixels of the frame, stays where it is. */
  zoom(z, x = this.frame.clientWidth / 2) {
    this.wake();
    const before = this.z;
    this.z = Math.min(Math.max(z, this.fit), 8);
    for (const drawing of this.drawings) drawing.zoom(this.z);
    const time = (this.frame.scrollLeft + x - LEFT) / before;
    this.frame.scrollLeft = time * this.z + LEFT - x;
    this.hold();
  }

  /* Names of ranks stay in sight. */
  hold() {
    this.wake();
    for (const { names } of this.drawings)
      names.setAttribute("transform", `translate(${this.frame.scrollLeft} 0)`);
  }

  tell(cell) {
    this.wake();
    this.at?.rect.classList.remove("at");
    this.at = cell;
    if (!cell) return;
    cell.rect.classList.add("at");
    this.output.textContent = cell.drawing.words(cell);
  }

  go(key) {
    this.wake();
    const cells = this.at?.drawing.cells ?? this.cells;
    if (!this.at) return this.tell(cells[0]);
    const { rank, x, wide } = this.at;
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const row = cells.filter((cell) => cell.rank === rank);
      const next = row[row.indexOf(this.at) + (key === "ArrowRight" ? 1 : -1)];
      if (next) this.tell(next);
    } else {
      const row = this.row(cells, rank, key === "ArrowDown" ? 1 : -1);
      const off = (cell) => Math.abs(cell.x + cell.wide / 2 - x - wide / 2);
      if (row.length) this.tell(row.reduce((a, b) => (off(b) < off(a) ? b : a)));
    }
    const left = LEFT + (this.at.x - LEFT) * this.z, room = this.frame.clientWidth;
    if (left < this.frame.scrollLeft + LEFT || left > this.frame.scrollLeft + room - 40)
      this.frame.scrollLeft = left - room / 2;
  }

  /* The cells of the next row, in this drawing or in the next one. */
  row(cells, rank, by) {
    const here = cells.filter((cell) => cell.rank === rank + by);
    const other = this.drawings[this.drawings.indexOf(this.at.drawing) + by];
    if (here.length || !other) return here;
    const last = Math.max(...other.cells.map((cell) => cell.rank));
    return other.cells.filter((cell) => cell.rank === (by > 0 ? 0 : last));
  }

  listen() {
    const { frame } = this;
    frame.addEventListener("scroll", () => this.hold(), { passive: true });
    frame.addEventListener("pointermove", ({ target, pointerType, buttons, clientX }) => {
      this.wake();
      if (pointerType === "mouse" && buttons === 1) frame.scrollLeft += this.pointer - clientX;
      this.pointer = clientX;
      const cell = this.of.get(target);
      if (cell && cell !== this.at) this.tell(cell);
    });
    frame.addEventListener("click", ({ target }) => { this.wake(); this.tell(this.of.get(target)); });
    frame.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key.startsWith("Arrow")) this.go(event.key);
      else if (event.key === "+" || event.key === "=") this.zoom(this.z * 1.5);
      else if (event.key === "-") this.zoom(this.z / 1.5);
      else if (event.key === "0") this.zoom(1);
      else return;
      event.preventDefault();
    });
    frame.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(this.z * (event.deltaY < 0 ? 1.2 : 1 / 1.2), event.clientX - frame.getBoundingClientRect().left);
    }, { passive: false });
  }
}

/* A wide timeline reaches over the table of contents, which goes while it is beside it. */
function uncover() {
  const contents = document.querySelector(".md-sidebar--secondary");
  if (!contents) return;
  const own = (contents.querySelector(".md-nav") ?? contents).getBoundingClientRect();
  const over = [...document.querySelectorAll(".xt-schedules")].some((frame) => {
    const { right, top, bottom } = frame.getBoundingClientRect();
    return right > own.left && bottom > own.top && top < own.bottom;
  });
  contents.classList.toggle("xt-covered", over);
}
let waiting = false;
const soon = () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; uncover(); });
};
addEventListener("scroll", soon, { passive: true });
new ResizeObserver(soon).observe(document.body); // folds open, screens turn

export function enhance(frame) {
  new Frame(frame);
  soon();
}
