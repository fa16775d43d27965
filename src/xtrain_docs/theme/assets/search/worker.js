// The worker of the search: what Material's page script sends and expects.
//
//     to us {type: SETUP, data: {docs}}        from us {type: READY}
//     to us {type: QUERY, data: "zero 3"}      from us {type: RESULT, data: {items}}
//
// An item is a page: a list of parts {location, title, text, score, terms}, the page
// itself among them, which has a location without "#". Title and text are HTML.
"use strict";

const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3];
const MOST_PAGES = 20;
const MOST_PARTS = 6; // of a page
const LEAST = 0.05; // of the score of the best page

let ranking;

self.addEventListener("message", ({ data: { type, data } }) => {
  if (type === SETUP) {
    ranking = new Ranking(data.docs);
    self.postMessage({ type: READY });
  } else if (type === QUERY) {
    self.postMessage({ type: RESULT, data: { items: answer(String(data)) } });
  }
});

function answer(query) {
  const found = ranking.pagesFor(query);
  const worth = found.filter(({ score }) => score >= LEAST * found[0].score);
  return worth.slice(0, MOST_PAGES).map((one) => item(one, query));
}

function item({ page, sections, score }, query) {
  const mark = marker(query);
  const terms = Object.fromEntries(typed(query).map((word) => [word, true]));
  const part = (location, title, text, own) => ({ location, title, text, score: own, terms });
  const where = page.trail.length > 1 ? ` <small>${escaped(page.trail[1])}</small>` : "";
  const parts = [part(page.at, mark(page.title) + where, mark(page.about), score)];
  const places = new Set(["", page.sections[0][0]]);
  for (const { section } of sections) {
    if (places.has(section.anchor)) continue;
    places.add(section.anchor);
    const location = `${page.at}#${section.anchor}`;
    // The page script folds what scores less than the page.
    parts.push(part(location, mark(section.title), mark(section.text), parts.length > 1 ? 0 : score));
    if (parts.length === MOST_PARTS) break;
  }
  return parts;
}

// Words to look for on the page that is opened.
function typed(query) {
  return query.split(/[\s"+]+/).filter((word) => word.length > 1 && !STOP.has(root(word.toLowerCase())));
}

function escaped(text) {
  const named = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return text.replace(/[&<>"]/g, (letter) => named[letter]);
}

// A function that makes HTML of a text, with the words of a query marked.
function marker(query) {
  const words = withoutStops(wordsOf(query));
  if (!words.length) return escaped;
  const begins = new RegExp(`(?<![\\p{L}\\p{N}])((?:${words.join("|")})[\\p{L}\\p{N}]*)`, "giu");
  return (text) =>
    text
      .split(begins)
      .map((piece, i) => (i % 2 ? `<mark data-md-highlight>${escaped(piece)}</mark>` : escaped(piece)))
      .join("");
}
