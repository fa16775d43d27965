/* xtrain's own behaviour: the trace player, copying code that stands alone, names
   for controls that come without one. No dependencies. */
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, parent = null, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function element(tag, attributes = {}, parent = null, text = "") {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

const ICONS = {
  play: "M4 2.5v11l9-5.5z",
  pause: "M3.5 2.5h3v11h-3zM9.5 2.5h3v11h-3z",
  back: "M11.5 2.5v11L4 8z M2.5 2.5h1.6v11H2.5z",
  next: "M4.500 2.5v11L12 8z M11.900 2.500h1.6v11h-1.6z",
};

function icon(button, name) {
  button.replaceChildren();
  const svg = make("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, button);
  make("path", { d: ICONS[name] }, svg);
}

const ease = (t) => (t < 0.5 ? 4 * t * t * t : 1 - (-2 * t + 2) ** 3 / 2);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const listed = (items) =>
  items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;
const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/* A field above the tables of the ledger: only rows with these words stay. */
function filterLedger() {
  const rows = [...document.querySelectorAll(".md-typeset tbody tr:has([class*=xt-ledger-])")];
  if (rows.length < 8) return;
  const tables = new Set(rows.map((row) => row.closest("table")));
  const field = element("input", {
    type: "search", class: "xt-filter", placeholder: "Filter", "aria-label": "Filter the rows",
  });
  document.querySelector(".md-typeset h1").after(field);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const table of tables) {
      let text = "", shown = false;
      for (const row of table.tBodies[0].rows) {
        const symbol = row.cells[0].textContent;
        text = symbol ? symbol : text;
        const whole = `${text} ${row.textContent}`.toLowerCase();
        row.hidden = !words.every((word) => whole.includes(word));
        shown ||= !row.hidden;
      }
      const heading = (table.closest(".md-typeset__scrollwrap") ?? table).previousElementSibling;
      if (heading?.tagName === "H2") heading.hidden = !shown;
      table.hidden = !shown;
    }
  });
}

/* Some seconds after the page is there, when the browser has nothing better to do. */
function whenQuiet(action) {
  const soon = () => setTimeout(() => (self.requestIdleCallback ?? setTimeout)(action), 2000);
  if (document.readyState === "complete") soon();
  else addEventListener("load", soon, { once: true });
}

/* Before it comes into sight, and not while the page loads. */
function whenNear(node, action) {
  new IntersectionObserver((seen, watcher) => {
    if (!seen.some((s) => s.isIntersecting)) return;
    watcher.disconnect();
    action();
  }, { rootMargin: "60%" }).observe(node);
}

class XtTrace extends HTMLElement {
  connectedCallback() {
    if (!this.data) whenNear(this, () => this.begin());
  }

  begin() {
    this.dataset.ready = "";
    this.data = JSON.parse(this.dataset.trace);
    this.at = 0;
    this.states = [this.data.initial, ...this.data.steps.map((s) => s.state)];
    const table = this.querySelector(".xt-trace-table");
    this.replaceChildren();
    this.build();
    if (table) {
      const details = element("details", {}, this);
      element("summary", {}, details, "Every message, as a table");
      table.tabIndex = 0;
      table.setAttribute("role", "region");
      table.setAttribute("aria-label", table.querySelector("caption").textContent);
      details.append(table);
    }
    new ResizeObserver(() => {
      const width = Math.round(this.clientWidth);
      if (width && Math.abs(width - (this.width || 0)) > 6) this.layout(width);
    }).observe(this);
    if (this.dataset.autoplay && !calm()) {
      this.looping = true;
      whenQuiet(() => new IntersectionObserver((seen, watcher) => {
        if (seen.some((s) => s.isIntersecting) && this.looping) {
          this.play();
          watcher.disconnect();
        }
      }, { threshold: 0.5 }).observe(this));
    }
  }

  build() {
    const { title, ranks, additive, kind } = this.data;
    const name = `Animation of ${title} on ${ranks} ranks. `;
    this.stage = element("div", {
      class: "xt-stage-frame", tabindex: "0", role: "group",
      "aria-label": `${name}Left and right arrow keys step, space plays and pauses.`,
    }, this);
    this.svg = make("svg", { class: "xt-stage", "aria-hidden": "true" }, this.stage);
    const legend = element("div", { class: "xt-legend" }, this);
    if (kind !== "barrier") {
      element("span", {}, legend, additive ? "Parts of rank" : "Data of rank");
      const roots = kind === "broadcast" ? [this.data.root] : [...Array(ranks).keys()];
      const scattered = kind === "scatter";
      if (scattered) legend.firstChild.textContent = "Data for rank";
      for (const rank of roots) {
        const item = element("span", {}, legend);
        element("i", { class: `xt-s${rank % 8}` }, item);
        item.append(String(rank));
      }
    }
    this.says = element("div", { class: "xt-says", "aria-live": "polite" }, this);
    const bar = element("div", { class: "xt-controls" }, this);
    const button = (label, picture, action, cls = "") => {
      const made = element("button", { type: "button", "aria-label": label, title: label, class: cls }, bar);
      icon(made, picture);
      made.addEventListener("click", () => { this.looping = false; action(); });
      return made;
    };
    this.playButton = button("Play", "play", () => this.toggle(), "xt-play");
    button("Step back", "back", () => this.go(this.at - 1));
    button("Step forward", "next", () => this.step());
    this.slider = element("input", {
      type: "range", min: 0, max: this.data.steps.length, value: 0, step: 1,
      "aria-label": "Step",
    }, bar);
    this.slider.addEventListener("input", () => { this.looping = false; this.go(Number(this.slider.value)); });
    this.counter = element("output", {}, bar);
    this.stage.addEventListener("keydown", (event) => this.key(event));
    this.stage.addEventListener("click", () => { this.looping = false; this.toggle(); });
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const act = {
      ArrowRight: () => this.step(), ArrowLeft: () => this.go(this.at - 1),
      Home: () => this.go(0), End: () => this.go(this.data.steps.length),
      " ": () => this.toggle(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    this.looping = false;
    act();
  }

  /* Where cards stand: around an ellipse, or two columns on a narrow screen. */
  layout(width) {
    this.width = width;
    const { ranks, cells } = this.data;
    const narrow = width < 520;
    const room = narrow ? width / 2 - 46 : 152;
    const size = cells ? Math.max(9, Math.min(cells === 1 ? 40 : narrow ? 26 : 31, Math.floor(room / cells))) : 0;
    const cardW = Math.max(84, cells * size + 22);
    const cardH = cells ? size + (cells > 1 ? 44 : 36) : 38;
    const margin = 16;
    let height;
    const place = [];
    if (narrow) {
      const rows = Math.ceil(ranks / 2);
      const gap = cardH + 40;
      height = rows * gap - 40 + 2 * margin;
      for (let r = 0; r < ranks; r++) {
        const left = r < rows;
        const row = left ? r : ranks - 1 - r + (rows * 2 - ranks);
        place.push({
          x: left ? margin + cardW / 2 : width - margin - cardW / 2,
          y: margin + cardH / 2 + row * gap,
        });
      }
    } else {
      const rx = Math.min((width - cardW) / 2 - margin, ranks > 4 ? 310 : 250);
      const ry = ranks === 2 ? 0 : ranks > 4 ? 182 : 140;
      height = 2 * ry + cardH + 2 * margin + (ranks === 2 ? 40 : 0);
      const turn = ranks === 2 ? Math.PI : -Math.PI / 2;
      for (let r = 0; r < ranks; r++) {
        const angle = turn + (2 * Math.PI * r) / ranks;
        place.push({ x: width / 2 + rx * Math.cos(angle), y: height / 2 + ry * Math.sin(angle) });
      }
    }
    Object.assign(this, { place, size, cardW, cardH, narrow });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    this.wires = make("g", {}, this.svg);
    this.flows = make("g", {}, this.svg);
    this.nodes = make("g", {}, this.svg);
    this.packets = make("g", {}, this.svg);
    const pairs = new Map();
    for (const step of this.data.steps)
      for (const m of step.messages) pairs.set(`${m.src}-${m.dst}`, m);
    if (pairs.size <= 28)
      for (const m of pairs.values()) make("path", { class: "xt-wire", d: this.path(m).d }, this.wires);
    if (!narrow && ranks > 2) {
      this.center = make("text", { class: "xt-center", "text-anchor": "middle", x: width / 2, y: height / 2 - 2 }, this.svg);
      this.centerNote = make("text", { class: "xt-center-note", "text-anchor": "middle", x: width / 2, y: height / 2 + 19 }, this.svg);
    } else this.center = this.centerNote = null;
    this.show(this.at);
  }

  /* The way of a message: from edge to edge, bent a little to its right. */
  path({ src, dst }) {
    const a = this.place[src], b = this.place[dst];
    const dx = b.x - a.x, dy = b.y - a.y, far = Math.hypot(dx, dy) || 1;
    const bend = Math.min(36, far * 0.13);
    const c = { x: (a.x + b.x) / 2 - (dy / far) * -bend, y: (a.y + b.y) / 2 + (dx / far) * -bend };
    const start = this.edge(a, c), end = this.edge(b, c);
    return { start, end, c, d: `M${start.x} ${start.y}Q${c.x} ${c.y} ${end.x} ${end.y}` };
  }

  edge(card, toward) {
    const dx = toward.x - card.x, dy = toward.y - card.y;
    const scale = Math.min(
      (this.cardW / 2 + 5) / (Math.abs(dx) || 1e-6), (this.cardH / 2 + 5) / (Math.abs(dy) || 1e-6));
    return { x: card.x + dx * scale, y: card.y + dy * scale };
  }

  colour(content, cell) {
    return this.data.kind === "scatter" ? [cell] : content;
  }

  /* A cell: empty, one colour, or one patch per rank whose part is in it. */
  cell(parent, x, y, size, content, cell, cls = "xt-cell") {
    const { additive, ranks } = this.data;
    make("rect", { class: cls, x, y, width: size, height: size, rx: 3 }, parent);
    const inner = size - 4;
    if (!content.length) return;
    if (!additive) {
      const [rank] = this.colour(content, cell);
      make("rect", { class: `xt-patch xt-s${rank % 8}`, style: "fill:var(--s)", x: x + 2, y: y + 2, width: inner, height: inner, rx: 2 }, parent);
      return;
    }
    const columns = ranks <= 3 ? ranks : Math.ceil(ranks / 2);
    const rows = Math.ceil(ranks / columns);
    const w = inner / columns, h = inner / rows;
    for (const rank of content)
      make("rect", {
        class: `xt-s${rank % 8}`, style: "fill:var(--s)",
        x: x + 2 + (rank % columns) * w + 0.3, y: y + 2 + Math.floor(rank / columns) * h + 0.3,
        width: w - 0.6, height: h - 0.6, rx: 1,
      }, parent);
  }

  drawNodes(state, fresh = new Set()) {
    const { ranks, cells } = this.data;
    const last = this.states.at(-1);
    this.nodes.replaceChildren();
    for (let rank = 0; rank < ranks; rank++) {
      const { x, y } = this.place[rank];
      const received = this.data.steps.slice(0, this.at).some((s) => s.messages.some((m) => m.dst === rank));
      const { kind, root } = this.data;
      const wants = !["gather", "reduce"].includes(kind) || rank === root;
      const done = wants && this.at > 0 && JSON.stringify(state[rank]) === JSON.stringify(last[rank])
        && (received || this.at === this.data.steps.length);
      const left = x - this.cardW / 2, top = y - this.cardH / 2;
      make("rect", { class: `xt-node${done ? " xt-node-done" : ""}`, x: left, y: top, width: this.cardW, height: this.cardH, rx: 9 }, this.nodes);
      make("text", { class: "xt-node-name", x, y: top + (cells ? 17 : this.cardH / 2 + 4.5), "text-anchor": "middle" }, this.nodes, `rank ${rank}`);
      const from = x - (cells * this.size) / 2;
      for (let i = 0; i < cells; i++) {
        const cls = fresh.has(`${rank}-${i}`) ? "xt-cell xt-cell-new" : "xt-cell";
        this.cell(this.nodes, from + i * this.size + 1, top + 24, this.size - 2, state[rank][i], i, cls);
        if (this.size >= 13 && cells > 1)
          make("text", { class: "xt-slot", x: from + (i + 0.5) * this.size, y: top + 24 + this.size + 10, "text-anchor": "middle" }, this.nodes, String(i));
      }
    }
  }

  drawFlows(messages) {
    this.flows.replaceChildren();
    for (const m of messages) {
      const { d, c, end } = this.path(m);
      make("path", { class: "xt-flow", d }, this.flows);
      const angle = (Math.atan2(end.y - c.y, end.x - c.x) * 180) / Math.PI;
      make("path", { class: "xt-flow-head", d: "M0 0L-9 -4.5L-9 4.5z", transform: `translate(${end.x} ${end.y}) rotate(${angle})` }, this.flows);
    }
  }

  changed(at) {
    const fresh = new Set();
    if (!at) return fresh;
    for (let r = 0; r < this.data.ranks; r++)
      for (let i = 0; i < this.data.cells; i++)
        if (JSON.stringify(this.states[at][r][i]) !== JSON.stringify(this.states[at - 1][r][i])) fresh.add(`${r}-${i}`);
    return fresh;
  }

  show(at) {
    this.at = at;
    cancelAnimationFrame(this.frame);
    this.packets.replaceChildren();
    this.drawNodes(this.states[at], this.changed(at));
    this.drawFlows(at ? this.data.steps[at - 1].messages : []);
    this.tell(at);
  }

  tell(at) {
    const total = this.data.steps.length;
    this.slider.value = at;
    this.slider.setAttribute("aria-valuetext", `${at} of ${total}`);
    this.counter.textContent = `step ${at} of ${total}`;
    const messages = at ? this.data.steps[at - 1].messages : [];
    this.says.textContent = at ? `Step ${at}: ${this.sentence(messages)}` : this.opening();
    if (this.center) {
      this.center.textContent = at ? `step ${at} of ${total}` : "start";
      this.centerNote.textContent = at ? plural(messages.length, "message") : plural(total, "step") + " to go";
    }
  }

  opening() {
    const { kind, ranks, root, cells, opening } = this.data;
    return opening ?? {
      all_reduce: cells === 1 ? `Each of the ${ranks} ranks holds a tensor. All need the sum.` : `Each of the ${ranks} ranks holds its own part of every cell. All need the sum of all parts.`,
      reduce: `Each rank holds its own part. Rank ${root} needs the sum.`,
      reduce_scatter: "Each rank holds its own part of every cell. Rank r needs the sum of cell r.",
      broadcast: `Only rank ${root} has the data. All need it.`,
      all_gather: "Each rank has one cell. All need all cells.",
      gather: `Each rank has one cell. Rank ${root} needs them all.`,
      scatter: `Rank ${root} has one cell for each rank.`,
      all_to_all: "Rank i has one cell for every rank: cell j is for rank j.",
      barrier: "No rank may continue before all have arrived. Messages carry no data.",
    }[kind];
  }

  sentence(messages) {
    const one = (m) => {
      if (m.op === "signal") return `rank ${m.src} signals rank ${m.dst}`;
      const all = m.cells.length === this.data.cells;
      const what = all ? (m.cells.length > 1 ? "all cells" : "the whole tensor") : `cell${m.cells.length > 1 ? "s" : ""} ${listed(m.cells)}`;
      return `rank ${m.src} sends ${what} to rank ${m.dst}${m.op === "add" ? ", which adds" : ""}`;
    };
    const shown = messages.slice(0, messages.length > 5 ? 3 : 5).map(one);
    const rest = messages.length - shown.length;
    return shown.join("; ") + (rest ? `; and ${plural(rest, "more message")} like it.` : ".");
  }

  go(at) {
    this.pause();
    this.show(Math.max(0, Math.min(this.data.steps.length, at)));
  }

  step() {
    this.pause();
    if (this.at < this.data.steps.length) this.animate(() => {});
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (this.at >= this.data.steps.length) this.show(0);
    this.playing = true;
    this.says.setAttribute("aria-live", "off");
    icon(this.playButton, "pause");
    this.playButton.setAttribute("aria-label", "Pause");
    this.playButton.title = "Pause";
    const next = () => {
      if (!this.playing) return;
      if (this.at < this.data.steps.length) {
        this.animate(() => { this.timer = setTimeout(next, 650); });
      } else if (this.looping) {
        this.timer = setTimeout(() => { this.show(0); this.timer = setTimeout(next, 1200); }, 2600);
      } else this.pause();
    };
    this.timer = setTimeout(next, 250);
  }

  pause() {
    clearTimeout(this.timer);
    if (this.frame && this.moving) {
      cancelAnimationFrame(this.frame);
      this.moving = false;
      this.show(this.at + 1);
    }
    this.playing = false;
    this.says.setAttribute("aria-live", "polite");
    icon(this.playButton, "play");
    this.playButton.setAttribute("aria-label", "Play");
    this.playButton.title = "Play";
  }

  /* Send the messages of the next step on their way, then show the state after it. */
  animate(then) {
    const to = this.at + 1;
    const messages = this.data.steps[this.at].messages;
    if (calm() || !this.place) {
      this.show(to);
      then();
      return;
    }
    this.drawNodes(this.states[this.at]);
    this.drawFlows(messages);
    this.packets.replaceChildren();
    this.tell(to);
    const packets = messages.map((m) => ({ node: this.packet(m), way: this.path(m) }));
    const began = performance.now(), lasts = 950;
    this.moving = true;
    const tick = (now) => {
      const t = ease(Math.min(1, (now - began) / lasts));
      for (const { node, way } of packets) {
        const { start: a, c, end: b } = way, u = 1 - t;
        const x = u * u * a.x + 2 * u * t * c.x + t * t * b.x;
        const y = u * u * a.y + 2 * u * t * c.y + t * t * b.y;
        node.setAttribute("transform", `translate(${x} ${y})`);
      }
      if (now - began < lasts) this.frame = requestAnimationFrame(tick);
      else {
        this.moving = false;
        this.show(to);
        then();
      }
    };
    this.frame = requestAnimationFrame(tick);
  }

  packet(message) {
    const group = make("g", { class: "xt-packet" }, this.packets);
    const count = message.cells.length;
    if (!count) {
      make("circle", { r: 6, class: "xt-flow-head" }, group);
      return group;
    }
    const size = count > 4 ? 12 : Math.max(14, Math.min(this.data.cells === 1 ? 30 : 20, this.size - 3));
    const width = count * size + 6;
    make("rect", { class: "xt-packet-ground", x: -width / 2, y: -size / 2 - 3, width, height: size + 6, rx: 5 }, group);
    message.cells.forEach((cell, i) =>
      this.cell(group, -width / 2 + 3 + i * size + 0.5, -size / 2 + 0.5, size - 1, message.content[i], cell));
    return group;
  }
}

if (!customElements.get("xt-trace")) customElements.define("xt-trace", XtTrace);

/* Escape puts the tip of a number away. */
addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.activeElement?.closest(".xt-value")?.blur();
});

/* Parts of the theme that come without a name, or as one landmark too many. */
function nameParts() {
  const name = (selector, words) => {
    for (const node of document.querySelectorAll(selector))
      if (!node.getAttribute("aria-label")) node.setAttribute("aria-label", words);
  };
  name(".md-search[role=dialog]", "Search");
  document.querySelector(".md-path")?.setAttribute("aria-label", "Path to this page");
  document.querySelectorAll(".md-code__nav").forEach((node, i) =>
    node.setAttribute("aria-label", `Code block ${i + 1}`));
  document.querySelectorAll(".md-nav .md-nav[aria-labelledby]").forEach((node, i) => {
    const words = document.getElementById(node.getAttribute("aria-labelledby"))?.textContent.trim();
    node.removeAttribute("aria-labelledby");
    node.setAttribute("aria-label", `Section ${i + 1}: ${words}`);
  });
}

/* What scrolls sideways is reached with the keyboard. A box is measured when it comes near
   the screen, because measuring all of them would lay out the whole page at once; until
   then it can be reached, in case it scrolls. */
const SCROLLERS = "pre > code, .md-typeset__scrollwrap, .md-typeset__table, .xt-math, "
  + ".xt-answer, .highlight-ipynb, .jp-OutputArea-output pre";
const near = new IntersectionObserver((seen) => {
  const boxes = seen.filter((s) => s.isIntersecting).map((s) => s.target);
  const wide = boxes.map((box) => box.scrollWidth > box.clientWidth + 1);
  boxes.forEach((box, i) => {
    if (wide[i]) box.tabIndex = 0;
    else if (box.hasAttribute("data-xt-unmeasured") && box !== document.activeElement)
      box.removeAttribute("tabindex");
    box.removeAttribute("data-xt-unmeasured");
  });
}, { rootMargin: "50%" });

function reachScrollers() {
  near.disconnect();
  for (const box of document.querySelectorAll(SCROLLERS)) {
    if (!box.hasAttribute("tabindex")) {
      box.tabIndex = 0;
      box.toggleAttribute("data-xt-unmeasured", true);
    }
    near.observe(box);
  }
}

let tidying = 0;
function tidySoon() {
  tidying ||= setTimeout(() => { tidying = 0; nameParts(); reachScrollers(); readSchedules(); }, 100);
}

/* Timelines bring their own script, too. */
const HERE = document.currentScript.src;
function readSchedules() {
  for (const drawing of document.querySelectorAll("svg.xs")) {
    const frame = drawing.closest(".xt-scroll:not(.xt-schedules)");
    frame?.classList.add("xt-schedules");
    if (frame)
      whenNear(frame, async () => (await import(new URL("schedules.mjs", HERE))).enhance(frame));
  }
}

nameParts();
readSchedules();
if (document.querySelector("[class*=xt-ledger-]")) filterLedger();
addEventListener("load", tidySoon);
addEventListener("resize", tidySoon);
addEventListener("toggle", tidySoon, { capture: true });
new MutationObserver((changes) => {
  if (changes.some(({ target }) => !target.closest("xt-trace"))) tidySoon();
}).observe(document.body, { childList: true, subtree: true });

/* Calculators and drills bring their own scripts, on the pages that have one. */
for (const name of ["calculator", "drill"])
  if (document.querySelector(`xtrain-${name}`)) import(new URL(`${name}.mjs`, HERE));
