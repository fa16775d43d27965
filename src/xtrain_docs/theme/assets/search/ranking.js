// Ranking: the sections of all pages as bags of words, scored by BM25 with fields.
"use strict";

// What a word counts in a field, and how many words such a field usually has.
const FIELDS = {
  page: { weight: 6, typical: 3 },
  about: { weight: 1.5, typical: 15 },
  title: { weight: 3, typical: 4 },
  names: { weight: 3, typical: 3 },
  text: { weight: 1, typical: 50 },
};
const SATURATION = 2.5; // at this weight a word has half of its score
const STOP_SHARE = 0.2; // of the score of a word such as "the"
const REPLACED = 0.95; // of the score of a reading with synonyms
const NAMED = 3; // times, for a section or page about the very name that was typed
const MENTIONED = 2; // times, for one that mentions it
const TITLED = 2; // times more, for a page whose title is like what was typed
const EXACT = 1.5; // times, for a page whose title is what was typed
const LONGEST = 12; // words of a query that are read

class Ranking {
  constructor({ pages, rooms, synonyms }) {
    this.pages = pages;
    this.rooms = rooms;
    for (const page of pages) writeAnchors(page.sections);
    this.sections = pages.flatMap((page, number) =>
      page.sections.map(([anchor, title, names, text, rest]) => ({ number, anchor, title, names, text, rest })),
    );
    this.postings = new Map(); // word -> Map(section -> weight)
    this.sections.forEach((section, i) => this.#add(i, section));
    const titles = pages.map(({ title }) => wordsOf(subject(title)));
    this.meaning = new Meaning(new Set(this.postings.keys()), titles, synonyms);
    this.titles = titles.map(withoutStops);
  }

  #add(i, { number, title, names, text, rest }) {
    const page = this.pages[number];
    const about = `${page.about} ${page.trail.join(" ")}`;
    const content = { page: subject(page.title), about, title, names, text: `${text} ${rest}` };
    for (const [field, { weight, typical }] of Object.entries(FIELDS)) {
      const words = indexed(content[field]);
      const own = weight / (0.5 + (0.5 * words.length) / typical);
      for (const word of words) {
        if (!this.postings.has(word)) this.postings.set(word, new Map());
        const posting = this.postings.get(word);
        posting.set(i, (posting.get(i) || 0) + own);
      }
    }
  }

  // Section -> score for one typed word. The words that it may mean share one rarity.
  #scores(meant) {
    const best = new Map();
    for (const [word, sure] of meant)
      for (const [i, weight] of this.postings.get(word))
        raise(best, i, (sure * weight) / (weight + SATURATION));
    const rarity = Math.log(1 + (this.sections.length - best.size + 0.5) / (best.size + 0.5));
    for (const [i, score] of best) best.set(i, score * rarity);
    return { best, rarity };
  }

  // Scores of sections and of pages for one list of words: the sum over its words, and
  // over neighbours that the pages write as one word, less what is not found. A page
  // has of each word what its best section has.
  #reading(words) {
    const [sections, pages] = [new Tally(), new Tally()];
    const add = ({ best, rarity }, share, part) => {
      const pageBest = new Map();
      for (const [i, score] of best) {
        sections.add(i, share * score, part * rarity);
        raise(pageBest, this.sections[i].number, score);
      }
      for (const [number, score] of pageBest) pages.add(number, share * score, part * rarity);
    };
    let wanted = 0;
    for (const word of words) {
      const share = STOP.has(word) ? STOP_SHARE : 1;
      const found = this.#scores(this.meaning.of(word));
      add(found, share, share);
      wanted += share * found.rarity;
    }
    for (const { word } of runs(words))
      if (this.postings.has(word)) add(this.#scores([[word, 1]]), 1, 0);
    const whole = pages.scores(wanted);
    for (const [number, score] of whole) {
      const likeness = this.#likeness(words, number);
      whole.set(number, score * (1 + TITLED * likeness ** 2) * (likeness === 1 ? EXACT : 1));
    }
    return { sections: sections.scores(wanted), pages: whole };
  }

  // How much of some words and of a page's title is in both, from 0 to 1.
  #likeness(words, number) {
    const meant = withoutStops(words).map((word) => this.meaning.of(word));
    const title = this.titles[number];
    const both = meant.filter((own) => title.some((word) => own.get(word) > 0.5)).length;
    return (2 * both) / (meant.length + title.length || 1);
  }

  // Pages, best first: {page, score, sections: [{section, score}, ...]}.
  pagesFor(query) {
    const [sections, pages] = [new Map(), new Map()];
    this.meaning.readings(wordsOf(query).slice(0, LONGEST)).forEach((words, k) => {
      const found = this.#reading(words);
      const share = k ? REPLACED : 1;
      for (const [i, score] of found.sections) raise(sections, i, share * score);
      for (const [number, score] of found.pages) raise(pages, number, share * score);
    });
    const found = new Map([...pages.keys()].map((number) => [number, []]));
    for (const [i, score] of sections) {
      const section = this.sections[i];
      const times = timesNamed(section, query);
      found.get(section.number).push({ section, times, score: times * score });
    }
    return [...found]
      .map(([number, own]) => {
        own.sort((a, b) => b.score - a.score);
        const page = this.pages[number];
        const [{ times, score }] = own;
        return { page, sections: own, score: this.rooms[page.room].weight * (times * pages.get(number) + score) };
      })
      .sort((a, b) => b.score - a.score);
  }
}

// Anchors that follow from titles: "=" is the title, and "." the title inside the last
// such one.
function writeAnchors(sections) {
  let outer = "";
  for (const section of sections) {
    const [anchor, title] = section;
    if (anchor === "=") section[0] = outer = title;
    else if (anchor === ".") section[0] = `${outer}.${title}`;
  }
}

// Sums of scores by section or page, and how much of the wanted words each has.
class Tally {
  constructor() {
    this.sums = new Map();
  }
  add(key, score, had) {
    const sum = this.sums.get(key) || { score: 0, had: 0 };
    this.sums.set(key, { score: sum.score + score, had: sum.had + had });
  }
  scores(wanted) {
    return new Map(
      [...this.sums].map(([key, { score, had }]) => [key, score * Math.sqrt(had / wanted || 0)]),
    );
  }
}

function raise(scores, key, score) {
  if (score > (scores.get(key) || 0)) scores.set(key, score);
}

// "Lecture 4: tensor parallelism" -> "tensor parallelism"
function subject(title) {
  return title.replace(/^Lecture \d+: /, "");
}

// How much more a section counts if it is about the very name that was typed, or, where
// that is the name of something in code, mentions it.
function timesNamed({ title, names, text, rest }, query) {
  const typed = query.trim();
  const has = (words) => words.toLowerCase().split(/[^\w-]+/).includes(typed.toLowerCase());
  if (title.toLowerCase() === typed.toLowerCase() || has(names)) return NAMED;
  return /\w_\w|[a-z][A-Z]/.test(typed) && has(`${text} ${rest}`) ? MENTIONED : 1;
}
