/* All questions of the interview: filters, answers that are fetched when asked for,
   flash cards, and what the reader knows, kept in this browser. Without this script the
   page is a list of links. */

const STORE = "xtrain.questions";
const WORDS = { 1: "not yet", 2: "nearly", 3: "known" };
const box = document.querySelector(".xt-questions");
const sections = [...box.querySelectorAll("h2")].map((head) => ({
  head, id: head.id, name: head.firstChild.textContent.trim(), list: head.nextElementSibling,
}));
const questions = sections.flatMap(({ id, list }) =>
  [...list.querySelectorAll("a[data-level]")].map((link) => ({
    link, item: link.closest("li"), lecture: id, key: `${id}#${link.hash.slice(1)}`,
    level: link.dataset.level, kind: link.dataset.kind, title: link.textContent,
  })));

function make(tag, attributes = {}, ...inside) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...inside);
  return node;
}

/* ------------------------------------------------------------- what the reader knows */

let known = {};
try {
  known = checked(JSON.parse(localStorage.getItem(STORE) ?? "{}"));
} catch { /* a store that cannot be read is an empty one */ }

/* Of an object only questions of this page, with a grade of 1 to 3. */
function checked(given) {
  const keys = new Set(questions.map(({ key }) => key));
  return Object.fromEntries(Object.entries(given ?? {})
    .filter(([key, grade]) => keys.has(key) && [1, 2, 3].includes(grade)));
}

function rate(question, grade) {
  known[question.key] = grade;
  keep();
}

function keep() {
  try {
    localStorage.setItem(STORE, JSON.stringify(known));
  } catch {
    say("This browser does not keep your grades: export them before you leave.");
  }
  for (const { key, item } of questions) {
    if (known[key]) item.dataset.known = WORDS[known[key]];
    else delete item.dataset.known;
  }
}

/* --------------------------------------------------------------------------- answers */

const pages = new Map();

function page(address) {
  if (!pages.has(address))
    pages.set(address, fetch(address).then((answer) => {
      if (!answer.ok) throw new Error(answer.statusText);
      return answer.text();
    }).then((text) => new DOMParser().parseFromString(text, "text/html"))
      .catch((problem) => { pages.delete(address); throw problem; }));
  return pages.get(address);
}

/* The block of a question on its page, with addresses as seen from here. */
async function answerOf({ link }) {
  const address = new URL(link.href);
  const anchor = address.hash.slice(1);
  address.hash = "";
  const found = (await page(address.href)).getElementById(anchor)?.closest("details");
  if (!found) throw new Error("the page has no such question");
  const parts = [...found.children].filter((part) => part.tagName !== "SUMMARY")
    .map((part) => document.importNode(part, true));
  const answer = make("div", { class: "xt-q-answer" }, ...parts);
  for (const node of answer.querySelectorAll("[id]")) node.removeAttribute("id");
  for (const name of ["href", "src"])
    for (const node of answer.querySelectorAll(`[${name}]`)) {
      const value = node.getAttribute(name);
      if (!value.startsWith("data:")) node.setAttribute(name, new URL(value, address.href).href);
    }
  return answer;
}

async function fill(place, question) {
  try {
    place.replaceChildren(await answerOf(question));
  } catch {
    place.replaceChildren(make("p", {}, "The answer could not be loaded. ",
      make("a", { href: question.link.href }, "Open its page"), "."));
  }
}

function grades(question, then = () => {}) {
  const buttons = Object.entries(WORDS).map(([grade, word]) => {
    const button = make("button", { type: "button", class: "xt-q-button" }, `${grade} ${word}`);
    button.addEventListener("click", () => { rate(question, Number(grade)); then(); });
    return button;
  });
  return make("div", { class: "xt-q-grades", role: "group", "aria-label": "How well did you know it?" },
    ...buttons);
}

function toggle(question) {
  const { link, item } = question;
  const open = link.getAttribute("aria-expanded") === "true";
  link.setAttribute("aria-expanded", String(!open));
  if (open) return item.querySelector(".xt-q-open").remove();
  const place = make("div", {}, "Loading …");
  item.append(make("div", { class: "xt-q-open" }, place, grades(question),
    make("p", {}, make("a", { href: link.href }, "On its page"))));
  fill(place, question);
}

for (const question of questions) {
  const { link } = question;
  link.setAttribute("role", "button");
  link.setAttribute("aria-expanded", "false");
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    toggle(question);
  });
  link.addEventListener("keydown", (event) => {
    if (event.key !== " ") return;
    event.preventDefault();
    toggle(question);
  });
}

/* --------------------------------------------------------------------------- filters */

const distinct = (name) => [...new Set(questions.map((question) => question[name]))];
const status = make("p", { class: "xt-q-status", role: "status" });
const say = (words) => { status.textContent = words; };

function choice(label, name, options) {
  const select = make("select", { name }, make("option", { value: "" }, "all"),
    ...options.map(([value, words]) => make("option", { value }, words)));
  return make("label", {}, label, select);
}

const same = (names) => names.map((name) => [name, name]);
const form = make("form", { class: "xt-q-bar", "aria-label": "Filter the questions" },
  make("label", {}, "Words", make("input", { type: "search", name: "words" })),
  choice("Lecture", "lecture", sections.map(({ id, name }) => [id, name])),
  choice("Level", "level", same(["basic", "usual", "deep"])),
  choice("Kind", "kind", same(distinct("kind").sort())),
  choice("Known", "known", [["0", "not rated"], ...Object.entries(WORDS)]));

function action(words, run) {
  const button = make("button", { type: "button", class: "xt-q-button" }, words);
  button.addEventListener("click", run);
  return button;
}

const file = make("input", { type: "file", accept: ".json", hidden: "", "aria-label": "Grades to import" });
const actions = make("div", { class: "xt-q-actions" },
  action("Flash cards", () => cards(0)), action("Print", () => print()),
  action("Export grades", exported), action("Import grades", () => file.click()), file);
box.before(form, actions, status);

function chosen() {
  const { words, ...exact } = Object.fromEntries(new FormData(form));
  const wanted = words.toLowerCase().split(/\s+/);
  return questions.filter((question) => {
    const grade = String(known[question.key] ?? 0);
    return wanted.every((word) => question.title.toLowerCase().includes(word))
      && ["lecture", "level", "kind"].every((name) => !exact[name] || question[name] === exact[name])
      && (!exact.known || grade === exact.known);
  });
}

function filter() {
  const shown = new Set(chosen());
  for (const question of questions) question.item.hidden = !shown.has(question);
  for (const { head, list } of sections) {
    const empty = !list.querySelector("li:not([hidden])");
    head.hidden = list.hidden = empty;
  }
  const count = Object.values(known).filter((grade) => grade === 3).length;
  say(`${shown.size} of ${questions.length} questions, ${count} known.`);
}

form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());

/* ------------------------------------------------------------------ grades as a file */

function exported() {
  const text = JSON.stringify({ xtrain: "questions", known }, null, 1);
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: address, download: "xtrain-questions.json" }).click();
  URL.revokeObjectURL(address);
}

file.addEventListener("change", async () => {
  try {
    const read = JSON.parse(await file.files[0].text());
    if (read?.xtrain !== "questions") throw new Error("another file");
    const found = checked(read.known);
    Object.assign(known, found);
    keep();
    filter();
    say(`${Object.keys(found).length} grades imported.`);
  } catch {
    say("This file has no grades of this page.");
  }
  file.value = "";
});

/* ----------------------------------------------------------------------- flash cards */

const dialog = make("dialog", { class: "xt-q-card md-typeset", "aria-label": "Flash cards" });
document.body.append(dialog);
let deck = [], at = 0;

function cards(start) {
  deck = chosen();
  if (!deck.length) return say("No question has all of these.");
  card(start);
  if (!dialog.open) dialog.showModal();
}

function card(number) {
  at = (number + deck.length) % deck.length;
  const question = deck[at];
  const place = make("div", { class: "xt-q-place" });
  const show = action("Show the answer", () => reveal(place, question));
  place.append(show);
  const grade = known[question.key];
  dialog.replaceChildren(
    make("p", { class: "xt-q-count" }, `${at + 1} of ${deck.length} · ${question.level} · ${question.kind}`
      + (grade ? ` · ${WORDS[grade]}` : "")),
    make("h2", { "aria-live": "polite" }, question.title), place, grades(question, () => card(at + 1)),
    make("div", { class: "xt-q-actions" }, action("← Back", () => card(at - 1)),
      action("Next →", () => card(at + 1)), action("Close", () => dialog.close())),
    make("p", { class: "xt-q-keys" }, "Keys: space shows, 1 2 3 grade, ← → move, Escape closes."));
  show.focus();
}

function reveal(place, question) {
  place.replaceChildren("Loading …");
  dialog.tabIndex = -1;
  dialog.focus();
  fill(place, question);
}

dialog.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const show = dialog.querySelector(".xt-q-place > button");
  const onButton = event.target.closest("button, a");
  if (event.key === "ArrowLeft") card(at - 1);
  else if (event.key === "ArrowRight") card(at + 1);
  else if (WORDS[event.key]) { rate(deck[at], Number(event.key)); card(at + 1); }
  else if (event.key === " " && show && (!onButton || onButton === show)) show.click();
  else return;
  event.preventDefault();
});
dialog.addEventListener("close", filter);

/* ------------------------------------------------------- as the address asks for it */

for (const [name, value] of new URLSearchParams(location.search))
  if (form.elements[name]) form.elements[name].value = value;
keep();
filter();
