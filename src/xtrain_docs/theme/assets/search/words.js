// Words: how a text, or what somebody types, is cut, and how near two words are.
"use strict";

// "Gradients" -> "gradient", "clipping" -> "clip", "parallelism" -> "parallel": the
// forms of a word are one word.
function root(word) {
  if (word.length < 4 || /\d/.test(word)) return word;
  let cut = word;
  if (/[^siu]s$/.test(cut)) cut = cut.replace(/ies$/, "y").replace(/s$/, "");
  cut = cut.replace(/ism$/, "");
  const stem = cut.replace(/(ing|ed)$/, "");
  if (stem !== cut && stem.length > 2 && /[aeiouy]/.test(stem))
    cut = stem.replace(/([^aeiousl])\1$/, "$1");
  return cut.length > 3 ? cut.replace(/e$/, "") : cut;
}

// The pieces of a text that hyphens, dots and underscores hold together, as lists of
// words: "all-reduce of ring_shift" -> [[all, reduce], [of], [ring, shift]].
function pieces(text) {
  const plain = text
    .normalize("NFKC")
    .replace(/['\u2019](s\b)?/g, "")
    .replace(/([a-z])([A-Z][a-z])/g, "$1_$2")
    .toLowerCase();
  return (plain.match(/[\p{L}\p{N}]+(?:[-_./\u2011\u2013]+[\p{L}\p{N}]+)*/gu) || []).map((piece) =>
    piece.match(/[\p{L}\p{N}]+/gu).map(root),
  );
}

function wordsOf(text) {
  return pieces(text).flat();
}

function singles(words) {
  return words.map((word, from) => ({ word, from, size: 1 }));
}

// Two to four neighbours written as one word: [all, to, all] -> allto, toall, alltoall.
function runs(words) {
  const found = [];
  for (let size = 2; size <= Math.min(words.length, 4); size++)
    for (let from = 0; from + size <= words.length; from++)
      found.push({ word: words.slice(from, from + size).join(""), from, size });
  return found;
}

// The words to index for a text: each one, and neighbours in a piece as one word.
function indexed(text) {
  return pieces(text).flatMap((words) => [...singles(words), ...runs(words)].map(({ word }) => word));
}

// How many letters to add, drop, change or swap to make one word of the other; more
// than `limit` is `limit` + 1.
function distance(a, b, limit) {
  if (Math.abs(a.length - b.length) > limit) return limit + 1;
  let before = [];
  let last = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const row = [i];
    for (let j = 1; j <= b.length; j++) {
      const change = a[i - 1] === b[j - 1] ? 0 : 1;
      row[j] = Math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + change);
      if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1])
        row[j] = Math.min(row[j], before[j - 2] + 1);
    }
    if (Math.min(...row) > limit) return limit + 1;
    [before, last] = [last, row];
  }
  return last[b.length];
}

// Words that nearly every page has.
const STOP = new Set(
  ("a an and are as at be by can do does for from has have how i if in is it its me my " +
    "not of on or should so that the this to was what when where which who why will " +
    "with you your")
    .split(" ")
    .map(root),
);

function withoutStops(words) {
  return words.filter((word) => !STOP.has(word));
}
