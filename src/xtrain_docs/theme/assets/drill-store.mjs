/* What a reader has written and solved, in this browser alone; one entry a drill:
   { level, texts: {body: ...}, seconds: {body: 61}, ended: {body: 1}, solved: {body: 61},
     hints, checks }: seconds since Start again, and the fewest of those that were enough. */

const BEGINS = "xtrain-drill:";
const FORMAT = "xtrain drills 1";
const LEVELS = ["gap", "body", "blank"];

export function read(name) {
  try {
    return whole(JSON.parse(localStorage.getItem(BEGINS + name)));
  } catch {
    return whole(null);
  }
}

/* False where the browser keeps nothing. */
export function write(name, entry) {
  try {
    localStorage.setItem(BEGINS + name, JSON.stringify(entry));
    return true;
  } catch {
    return false;
  }
}

/* An entry of the right shape, whatever a file holds. */
function whole(given) {
  const of = (part, kind) => Object.fromEntries(
    LEVELS.filter((level) => typeof given?.[part]?.[level] === kind)
      .map((level) => [level, given[part][level]]));
  const count = (part) => (Number.isInteger(given?.[part]) ? given[part] : 0);
  return {
    level: LEVELS.includes(given?.level) ? given.level : "body",
    texts: of("texts", "string"), seconds: of("seconds", "number"), ended: of("ended", "number"),
    solved: of("solved", "number"),
    hints: count("hints"), checks: count("checks"),
  };
}

export function download(names) {
  const touched = names.filter((name) => localStorage.getItem(BEGINS + name));
  const drills = Object.fromEntries(touched.map((name) => [name, read(name)]));
  const text = JSON.stringify({ format: FORMAT, drills }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "xtrain-drills.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  return touched.length;
}

/* The drills of a file that was exported: those that are in it, as they are there. */
export function parse(text, names) {
  let given = null;
  try {
    given = JSON.parse(text);
  } catch { /* told below */ }
  if (given?.format !== FORMAT) throw new Error("This file was not exported from this page.");
  const known = Object.entries(given.drills ?? {}).filter(([name]) => names.includes(name));
  return new Map(known.map(([name, entry]) => [name, whole(entry)]));
}

export const minutes = (seconds) =>
  `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
