/* Drills in the page: the list, what has been solved, and the desk of the one that the
   address names (#ring_all_reduce). Editor and Python are loaded once a drill is opened. */

import { download, minutes, parse, read, write } from "./drill-store.mjs";

const BASE = new URL("./", import.meta.url);
const LIST = "#drills"; // the heading above the list

async function json(name) {
  const found = await fetch(new URL(`drills/${name}.json`, BASE));
  if (!found.ok) throw new Error(`${name}.json: ${found.status}`);
  return found.json();
}

class XtrainDrill extends HTMLElement {
  connectedCallback() {
    if (this.list) return;
    this.list = this.querySelector(".xt-drills");
    this.status = this.querySelector(".xt-status");
    this.items = [...this.list.querySelectorAll("li")];
    this.names = this.items.map(({ id }) => id);
    this.keep();
    this.progress();
    addEventListener("hashchange", () => this.route());
    this.route();
  }

  /* Buttons that take what has been written along, to another browser. */
  keep() {
    const bar = document.createElement("p");
    bar.className = "xt-drill-keep";
    bar.innerHTML = `<span class="xt-drill-sum"></span><button class="md-button" type="button">Export</button>
      <button class="md-button" type="button">Import</button><input type="file" accept=".json" hidden aria-label="File to import">`;
    const [out, into] = bar.querySelectorAll("button");
    const file = bar.querySelector("input");
    out.onclick = () => {
      const count = download(this.names);
      this.status.textContent = `${count} of ${this.names.length} drills exported to one file.`;
    };
    into.onclick = () => file.click();
    file.onchange = async () => {
      try {
        const found = parse(await file.files[0].text(), this.names);
        const kept = [...found].every(([name, entry]) => write(name, entry));
        this.status.textContent = kept
          ? `${found.size} drills imported, in place of what was here of them.`
          : "This browser keeps no data of this page.";
      } catch (problem) {
        this.status.textContent = problem.message;
      }
      file.value = "";
      this.progress();
    };
    this.list.before(bar);
  }

  progress() {
    let passed = 0, spent = 0;
    for (const item of this.items) {
      const { solved, texts, checks } = read(item.id);
      const times = Object.entries(solved);
      passed += times.length > 0;
      spent += times.reduce((sum, [, seconds]) => sum + seconds, 0);
      item.toggleAttribute("data-solved", times.length > 0);
      item.querySelector(".xt-drill-done").textContent = times.length
        ? times.map(([level, seconds]) => `solved (${level}) in ${minutes(seconds)}`).join(", ")
        : checks || Object.keys(texts).length ? "begun" : "";
    }
    this.querySelector(".xt-drill-sum").textContent =
      `${passed} of ${this.names.length} solved${passed ? `, in ${Math.max(1, Math.round(spent / 60))} min` : ""}`;
  }

  route() {
    const name = decodeURIComponent(location.hash.slice(1));
    if (this.names.includes(name)) return this.open(name);
    if (this.desk && ["", LIST].includes(location.hash)) this.close();
  }

  async open(name) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.desk?.remove();
    this.desk = null;
    this.toggleAttribute("data-open", true);
    this.status.textContent = "Loading …";
    try {
      const [{ Desk }, { Python }, index, drill] = await Promise.all([
        import("./drill-desk.mjs"), import("./drill-python.mjs"), json("index"), json(name)]);
      const { edit } = await this.editor(index.editor);
      if (turn !== this.turn) return;
      this.python ??= index.python ? new Python() : null;
      this.status.textContent = index.python ? "" : this.status.textContent;
      this.desk = new Desk(this, drill, { edit, python: this.python, list: LIST });
    } catch {
      if (turn !== this.turn) return;
      this.status.textContent = "The drill could not be loaded.";
      this.removeAttribute("data-open");
    }
  }

  async editor(built) {
    try {
      if (built) return await import(new URL("editor/editor.mjs", BASE));
    } catch { /* the plain one, then */ }
    return import("./drill-plain.mjs");
  }

  close() {
    this.turn += 1;
    const { name } = this.desk;
    this.desk.remove();
    this.desk = null;
    this.removeAttribute("data-open");
    this.progress();
    this.items.find(({ id }) => id === name).querySelector("a").focus();
  }
}

customElements.define("xtrain-drill", XtrainDrill);
