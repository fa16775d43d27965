/* One drill being written: editor, clock, buttons, and Python's verdict on the file. */

import { Steps, safe } from "./drill-steps.mjs";
import { minutes, read, write } from "./drill-store.mjs";

const LEVELS = {
  gap: "gap: some lines are missing", body: "body: signatures stand", blank: "blank: the task alone",
};
const KEYS = "Ctrl+Enter checks. Tab indents; Escape, then Tab, leaves the editor.";

function make(tag, properties = {}, ...children) {
  const { class: className, ...rest } = properties;
  const node = Object.assign(document.createElement(tag), rest);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function choice(label, options, value, change) {
  const select = make("select", {}, ...Object.entries(options).map(([key, words]) =>
    make("option", { value: key, textContent: words, selected: key === String(value) })));
  select.addEventListener("change", () => change(select.value));
  return make("label", {}, make("span", { textContent: label }), select);
}

/* Words with `code` in them. */
const spans = (words) => words.split("`").map((part, i) =>
  i % 2 ? make("code", { textContent: part }) : part);

/* A question in a dialog; true if the answer is yes. */
function asked(words, yes) {
  const dialog = make("dialog", { class: "xt-ask" }, make("form", { method: "dialog" },
    make("p", { textContent: words }),
    make("button", { class: "md-button md-button--primary", value: "yes", textContent: yes }),
    make("button", { class: "md-button", value: "no", textContent: "Cancel" })));
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    dialog.remove();
    resolve(dialog.returnValue === "yes");
  }));
}

export class Desk {
  constructor(parent, drill, { edit, python, list }) {
    Object.assign(this, { drill, python, name: drill.name, ranks: 4 });
    this.entry = read(drill.name);
    this.build(list);
    parent.append(this.box);
    this.editor = edit(this.place, {
      text: this.text, label: `${drill.name}.py, the file you write`, describedby: "xt-keys",
      change: () => this.typed(),
    });
    this.second = setInterval(() => this.tick(), 1000);
    this.away = () => this.save();
    addEventListener("pagehide", this.away);
    document.addEventListener("visibilitychange", this.away);
    this.refresh();
    this.title.focus({ preventScroll: true });
    this.box.scrollIntoView({ block: "start" });
    if (python && !navigator.connection?.saveData) python.prepare(drill.name);
  }

  get level() { return this.entry.level; }
  get text() { return this.entry.texts[this.level] ?? this.drill.tasks[this.level]; }

  build(list) {
    const { drill } = this;
    const button = (words, action, look = "") =>
      make("button", { type: "button", class: `md-button ${look}`, textContent: words, onclick: action });
    this.title = make("h3", { tabIndex: -1, textContent: drill.name });
    const facts = { Computes: drill.computes, Sends: drill.sends, "Leaves out": drill.leaves_out };
    const about = make("dl", {}, make("dt", { textContent: "Write" }),
      make("dd", {}, make("code", { textContent: drill.called })), ...Object.entries(facts).filter(([, words]) => words).flatMap(
      ([word, words]) => [make("dt", { textContent: word }), make("dd", {}, ...spans(words))]));
    const counts = Object.fromEntries([2, 3, 4, 5, 6, 7, 8].map((ranks) => [ranks, `${ranks} ranks`]));
    this.clock = make("p", { class: "xt-clock" });
    const bar = make("div", { class: "xt-desk-bar" },
      choice("Begin with", LEVELS, this.level, (level) => this.change(level)),
      choice("Draw", counts, this.ranks, (ranks) => this.draw(Number(ranks))), this.clock);
    this.place = make("div", { class: "xt-editor" });
    this.checks = button("Check", () => this.check(), "md-button--primary");
    this.stops = button("Stop", () => this.python.stop());
    this.hint = button("Hint", () => this.nextHint());
    this.solves = button("Solution", () => this.solution());
    const buttons = make("div", { class: "xt-desk-buttons" }, this.checks, this.stops, this.hint,
      this.solves, button("Start again", () => this.again()));
    this.says = make("p", { class: "xt-says-verdict" });
    this.says.setAttribute("role", "status");
    this.aside = make("p", { class: "xt-aside" });
    this.answer = make("div", { class: "xt-drawn" });
    this.help = make("div", { class: "xt-help" });
    this.box = make("div", { class: "xt-desk" },
      make("p", { class: "xt-desk-back" }, make("a", { href: list, textContent: "← All drills" })),
      this.title, about, bar,
      make("div", { class: "xt-desk-two" },
        make("div", {}, this.place, make("p", { id: "xt-keys", class: "xt-aside", textContent: KEYS }), buttons),
        make("div", { class: "xt-said" }, this.says, this.aside, this.answer, this.help)));
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.check();
    });
  }

  /* ---- what is written, and the clock ---- */

  typed() {
    const { entry, level } = this;
    entry.seconds[level] ??= 0;
    entry.texts[level] = this.editor.text;
    clearTimeout(this.later);
    this.later = setTimeout(() => this.save(), 400);
    this.showClock();
  }

  save() {
    const touched = this.entry.checks || this.entry.hints || Object.keys(this.entry.seconds).length;
    if (touched && !write(this.name, this.entry))
      this.aside.textContent = "This browser keeps no data of this page: what you write is lost with it.";
  }

  tick() {
    const { entry, level } = this;
    if (document.hidden || entry.seconds[level] === undefined || entry.ended[level]) return;
    entry.seconds[level] += 1;
    if (entry.seconds[level] % 5 === 0) this.save();
    this.showClock();
  }

  showClock() {
    const { entry, level, drill } = this;
    const spent = entry.seconds[level] ?? 0;
    this.clock.textContent = entry.ended[level]
      ? `Solved in ${minutes(spent)}; ${drill.minutes} min are given.`
      : `${minutes(spent)} of ${drill.minutes} min`;
    this.clock.classList.toggle("xt-over", !entry.ended[level] && spent > 60 * drill.minutes);
  }

  change(level) {
    this.entry.level = level;
    this.editor.text = this.text;
    this.forget();
    this.refresh();
    this.save();
  }

  async again() {
    if (!(await asked("Replace your text by the one to begin with, and set the clock to zero?", "Start again"))) return;
    for (const part of ["texts", "seconds", "ended"]) delete this.entry[part][this.level];
    this.entry.hints = 0;
    write(this.name, this.entry);
    this.editor.text = this.text;
    this.forget();
    this.refresh();
    this.editor.focus();
  }

  /* ---- help ---- */

  refresh() {
    const { hints } = this.drill, given = this.entry.hints;
    this.hint.textContent = given ? `Hint (${given} of ${hints.length} given)` : "Hint";
    this.hint.disabled = given >= hints.length;
    this.help.replaceChildren(...hints.slice(0, given).map((hint, i) => this.paragraphs(`Hint ${i + 1}. ${hint}`)));
    this.showClock();
    this.busy = false;
  }

  /* Words, then code after an empty line. */
  paragraphs(words) {
    const [first, ...code] = words.split("\n\n");
    const shown = make("div", {}, make("p", { textContent: first }));
    if (code.length) shown.append(make("pre", { tabIndex: 0 }, make("code", { textContent: code.join("\n\n") })));
    return shown;
  }

  nextHint() {
    this.entry.hints += 1;
    this.save();
    this.refresh();
    this.help.lastChild.scrollIntoView({ block: "nearest" });
  }

  async solution() {
    if (!(await asked("Show the whole solution?", "Show it"))) return;
    const shown = make("div", {}, make("p", { textContent: "The whiteboard form:" }),
      make("pre", { tabIndex: 0 }, make("code", { textContent: this.drill.solution })));
    this.help.append(shown);
    shown.scrollIntoView({ block: "nearest" });
  }

  /* ---- Python ---- */

  set busy(on) {
    this.running = on;
    this.box.toggleAttribute("data-busy", on);
    this.checks.disabled = on || !this.python;
    this.stops.disabled = !on;
  }

  forget() {
    this.steps?.remove();
    this.steps = null;
    this.answer.replaceChildren();
    this.says.textContent = this.aside.textContent = "";
    this.says.className = "xt-says-verdict";
    this.checked = false;
  }

  draw(ranks) {
    this.ranks = ranks;
    if (this.checked) this.check(false);
  }

  async check(counts = true) {
    if (this.running || !this.python) return;
    const { python, editor, entry, level } = this;
    const source = editor.text;
    this.forget();
    this.busy = true;
    this.says.textContent = "Loading Python, about 6 MB, once …";
    try {
      await python.warm();
      this.says.textContent = "Checking …";
      const began = performance.now();
      const answer = await python.answer(this.name, source, this.ranks);
      this.show(answer, (performance.now() - began) / 1000);
      if (counts) entry.checks += 1;
      if (answer.right && !entry.ended[level]) this.solved(level);
    } catch (problem) {
      this.says.textContent = problem.message;
      this.says.classList.add("xt-bad");
    }
    this.says.scrollIntoView({ block: "nearest" });
    this.busy = false;
    this.save();
    this.showClock();
  }

  solved(level) {
    const { entry } = this;
    const spent = (entry.seconds[level] ??= 0);
    entry.ended[level] = 1;
    entry.solved[level] = Math.min(entry.solved[level] ?? Infinity, spent);
  }

  show({ right, words, lines, title, frames, messages, printed }, seconds) {
    this.checked = true;
    this.says.textContent = words;
    this.says.classList.add(right ? "xt-good" : "xt-bad");
    this.aside.textContent = `Checked by Python in this page in ${seconds.toFixed(2)} s.`;
    this.editor.mark(lines ?? []);
    if (frames?.length) this.steps = new Steps(this.answer, title, frames, right ? 0 : frames.length - 1);
    if (printed) this.answer.append(make("details", {}, make("summary", { textContent: "What it prints" }), make("pre", { textContent: printed })));
    if (!messages) return;
    const table = make("div", { class: "xt-messages", tabIndex: 0 }, ...safe(messages));
    table.setAttribute("role", "region");
    table.setAttribute("aria-label", "Messages");
    this.answer.append(make("details", {}, make("summary", { textContent: "Every message, as a table" }), table));
  }

  remove() {
    if (this.running) this.python.stop();
    clearInterval(this.second);
    clearTimeout(this.later);
    this.save();
    removeEventListener("pagehide", this.away);
    document.removeEventListener("visibilitychange", this.away);
    this.steps?.remove();
    this.editor.remove();
    this.box.remove();
  }
}
