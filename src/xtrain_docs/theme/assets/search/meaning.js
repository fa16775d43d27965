// Meaning: which words of the pages somebody may mean with what was typed.
"use strict";

const MOST = 40; // words that the beginning of one may mean

class Meaning {
  // `vocabulary` are the words of all pages, `titles` lists of words, and `synonyms` is
  // {"oom": ["memory math"]}: what people type, and how the pages say it.
  constructor(vocabulary, titles, synonyms) {
    this.vocabulary = vocabulary;
    this.known = new Map(); // typed words that were looked up before
    this.compounds = new Map(); // "zerobubble" -> [zero, bubble], neighbours in a title
    for (const title of titles)
      for (const { word, from, size } of runs(title))
        this.compounds.set(word, title.slice(from, from + size));
    this.synonyms = new Map(
      Object.entries(synonyms).map(([phrase, others]) => [
        wordsOf(phrase).join(""),
        others.map(wordsOf),
      ]),
    );
  }

  // The words that a typed one may be, each with how surely, from 0 to 1.
  of(word) {
    if (!this.known.has(word)) {
      const near = this.#beginnings(word);
      this.known.set(word, near.size ? near : this.#misspelt(word));
    }
    return this.known.get(word);
  }

  // The word itself; longer ones that it begins, and shorter ones that begin it.
  #beginnings(word) {
    const found = new Map();
    const certain = this.vocabulary.has(word) ? 0.7 : 1;
    for (const other of this.vocabulary)
      if (other === word) found.set(other, 1);
      else if (other.startsWith(word) && word.length > 1)
        found.set(other, Math.max(0.1, (0.9 * certain * word.length) / other.length));
      else if (word.startsWith(other) && other.length > 3 && word.length < other.length + 3)
        found.set(other, 0.5);
    return new Map([...found].sort((a, b) => b[1] - a[1]).slice(0, MOST));
  }

  // Words that are one mistake away, or two if the word is long.
  #misspelt(word) {
    const found = new Map();
    const limit = word.length > 7 ? 2 : word.length > 3 ? 1 : 0;
    for (const other of limit ? this.vocabulary : []) {
      const far = other.length > 2 ? distance(word, other, limit) : limit + 1;
      if (far <= limit) found.set(other, (other[0] === word[0] ? 0.7 : 0.5) / far);
    }
    return found;
  }

  // What was typed; the same with words parted that a title writes apart; and the same
  // with each phrase that has synonyms replaced, written in one word or several.
  readings(words) {
    const parted = words.flatMap((word) => this.compounds.get(word) || [word]);
    const found = parted.length > words.length ? [words, parted] : [words];
    for (const { word, from, size } of [...singles(words), ...runs(words)])
      for (const other of this.synonyms.get(word) || [])
        found.push([...words.slice(0, from), ...other, ...words.slice(from + size)]);
    return found;
  }
}
