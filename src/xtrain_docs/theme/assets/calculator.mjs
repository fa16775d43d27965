/* Calculators: a form, and an answer that Python computes in a worker. Nothing is loaded
   until a reader asks for something, or comes by a link that does. */

const BASE = new URL("./", import.meta.url);
let worker = null;
let last = 0;
const waiting = new Map();

function ask(name, values) {
  if (!worker) {
    worker = new Worker(new URL("calculator-worker.mjs", BASE), { type: "module" });
    worker.onmessage = ({ data }) => {
      const { resolve, reject } = waiting.get(data.id);
      waiting.delete(data.id);
      if (data.error) reject(new Error(data.error));
      else resolve(data.answer);
    };
    worker.onerror = (event) => {
      event.preventDefault();
      for (const { reject } of waiting.values())
        reject(new Error("Python could not be started in this browser."));
      waiting.clear();
      worker = null;
    };
  }
  return new Promise((resolve, reject) => {
    waiting.set(++last, { resolve, reject });
    worker.postMessage({ id: last, name, values });
  });
}

class XtrainCalculator extends HTMLElement {
  connectedCallback() {
    if (this.form) return;
    this.form = this.querySelector("form");
    this.status = this.querySelector(".xt-status");
    this.box = this.querySelector(".xt-answer");
    if (this.form.querySelector("fieldset").disabled) return;
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.compute(true); });
    this.form.addEventListener("input", () => this.toggleAttribute("data-stale", true));
    this.form.addEventListener("change", async ({ target }) => {
      if (target.dataset.into) await this.take(target);
      if (this.asked) this.compute(true);
    });
    const shared = new URLSearchParams(location.search);
    if (shared.get("calculator") === this.dataset.name) {
      for (const control of this.form.elements)
        if (control.name && shared.has(control.name)) control.value = shared.get(control.name);
      this.compute(false);
    }
  }

  /* The numbers and words of a JSON file, for the link to hold; other text as it is. */
  async take(input) {
    let text = (await input.files[0]?.text()) ?? "";
    try {
      const plain = Object.entries(JSON.parse(text)).filter(([, value]) => typeof value !== "object");
      text = JSON.stringify(Object.fromEntries(plain));
    } catch { /* Python says what is wrong with it */ }
    this.form.elements[input.dataset.into].value = text;
  }

  async compute(share) {
    if (!this.form.reportValidity()) return;
    const values = Object.fromEntries(
      [...new FormData(this.form)].filter(([, value]) => typeof value === "string"));
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.status.textContent = this.asked ? "Computing …" : "Loading Python, about 6 MB, once …";
    this.asked = true;
    this.toggleAttribute("data-busy", true);
    this.classList.remove("xt-wrong");
    const began = performance.now();
    try {
      const answer = await ask(this.dataset.name, values);
      if (turn !== this.turn) return;
      this.box.innerHTML = answer;
      this.removeAttribute("data-stale");
      this.status.textContent = `Computed by Python in this page in ${((performance.now() - began) / 1000).toFixed(2)} s.`;
    } catch (problem) {
      if (turn !== this.turn) return;
      this.classList.add("xt-wrong");
      this.status.textContent = problem.message;
    }
    this.removeAttribute("data-busy");
    if (share) {
      const query = new URLSearchParams({ calculator: this.dataset.name, ...values });
      history.replaceState(null, "", `?${query}#${this.id}`);
    }
  }
}

customElements.define("xtrain-calculator", XtrainCalculator);
