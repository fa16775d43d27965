/* Who asks Python: one worker that answers, one that stands by for when the first has to be
   ended. A file that does not come to an end is stopped by ending its worker. */

const BASE = new URL("./", import.meta.url);
const FIRST = 25, LATER = 15; // seconds that an answer may take, from when Python is loaded
const HEAP = 700e6; // bytes; what Python has taken it does not give back
const SMALL = (navigator.deviceMemory ?? 8) <= 4;

export class Stopped extends Error {}

class One {
  constructor() {
    this.worker = new Worker(new URL("drill-worker.mjs", BASE), { type: "module" });
    this.worker.onmessage = ({ data }) => this.hear(data);
    this.worker.onerror = (event) => {
      event.preventDefault();
      this.fail(new Error("Python could not be started in this browser."));
    };
    this.loaded = new Promise((resolve, reject) => Object.assign(this, { resolve, reject }));
    this.loaded.catch(() => {});
    this.answers = 0;
    this.last = 0;
  }

  hear({ id, ready, answer, error, heap }) {
    if (ready) return this.resolve();
    if (id === 0) return this.fail(new Error(error));
    if (id !== this.last || !this.turn) return;
    const { resolve, reject } = this.turn;
    this.turn = null;
    this.answers += 1;
    this.full = heap > HEAP;
    if (error) reject(new Error(error));
    else resolve(answer);
  }

  fail(problem) {
    this.broken = true;
    this.worker.terminate();
    this.reject(problem);
    this.turn?.reject(problem);
    this.turn = null;
  }

  async answer(message) {
    await this.loaded;
    const seconds = this.answers ? LATER : FIRST;
    const words = `No answer within ${seconds} seconds, so the file was stopped. Does a loop in it end?`;
    const alarm = setTimeout(() => this.fail(new Stopped(words)), seconds * 1000);
    try {
      return await new Promise((resolve, reject) => {
        this.turn = { resolve, reject };
        this.worker.postMessage({ id: ++this.last, ...message });
      });
    } finally {
      clearTimeout(alarm);
    }
  }
}

export class Python {
  /* Begins to load; resolves when Python is there. */
  warm() {
    if (!this.one || this.one.broken) [this.one, this.spare] = [this.spare ?? new One(), null];
    return this.one.loaded;
  }

  /* A drill will be checked soon. */
  prepare(name) {
    this.warm().catch(() => {});
    this.one.worker.postMessage({ name });
  }

  async answer(name, source, ranks) {
    this.warm();
    const { one } = this;
    try {
      return await one.answer({ name, source, ranks });
    } finally {
      if (one.full) one.fail(new Stopped("Python is loaded anew."));
      if (one.broken) this.warm();
      if (!this.spare && !SMALL) (self.requestIdleCallback ?? setTimeout)(() => this.standBy());
    }
  }

  standBy() {
    if (!this.spare && this.one && !this.one.broken) this.spare = new One();
  }

  stop() {
    this.one?.fail(new Stopped("Stopped."));
    this.warm();
  }
}
