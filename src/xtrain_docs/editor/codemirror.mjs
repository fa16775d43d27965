/* The editor of the drills: CodeMirror with Python, and lines marked as wrong. The build
   joins this file and the packages it names into one. `drill-plain.mjs` has the same
   function for a copy of the site without them. */

import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import {
  HighlightStyle, LRLanguage, bracketMatching, indentService, indentUnit, syntaxHighlighting,
} from "@codemirror/language";
import { EditorState, RangeSet, StateEffect, StateField } from "@codemirror/state";
import {
  Decoration, EditorView, GutterMarker, drawSelection, gutterLineClass, highlightActiveLine,
  keymap, lineNumbers,
} from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { parser } from "@lezer/python";

const colour = (name) => ({ color: `var(--xt-code-${name})` });
const COLOURS = HighlightStyle.define([
  { tag: [tags.keyword, tags.operatorKeyword, tags.self, tags.bool, tags.null], ...colour("k") },
  { tag: [tags.function(tags.variableName), tags.function(tags.definition(tags.variableName)),
    tags.definition(tags.className), tags.function(tags.propertyName)], ...colour("f") },
  { tag: [tags.string, tags.special(tags.string)], ...colour("s") },
  { tag: tags.number, ...colour("n") },
  { tag: tags.comment, ...colour("c") },
  { tag: [tags.operator, tags.meta], ...colour("o") },
]);
const LOOK = EditorView.theme({
  "&": { color: "var(--xt-ink)", backgroundColor: "var(--xt-card)" },
  "&.cm-focused": { outline: "2px solid var(--xt-link)", outlineOffset: "1px" },
  ".cm-scroller": { fontFamily: "var(--md-code-font-family)", lineHeight: "1.55" },
  ".cm-content": { caretColor: "var(--xt-ink)", padding: "0.5rem 0" },
  ".cm-cursor": { borderLeftColor: "var(--xt-ink)" },
  ".cm-gutters": {
    color: "var(--xt-faint)", backgroundColor: "var(--xt-card)", borderColor: "var(--xt-line)",
  },
  ".cm-activeLine": { backgroundColor: "color-mix(in srgb, var(--xt-sunk) 60%, transparent)" },
  "&.cm-focused .cm-selectionBackground, .cm-selectionBackground": {
    backgroundColor: "color-mix(in srgb, var(--xt-link) 28%, transparent) !important",
  },
  "&.cm-focused .cm-matchingBracket": { backgroundColor: "var(--xt-mark)" },
  ".cm-line.xt-bad-line": { backgroundColor: "var(--xt-bad-ground)" },
  ".cm-gutterElement.xt-bad-line": {
    color: "var(--xt-bad)", fontWeight: "700", backgroundColor: "var(--xt-bad-ground)",
  },
});

/* A block is four spaces further in than what opens it; after `return` it ends. */
const indents = indentService.of((context, at) => {
  const before = context.lineAt(at, -1);
  const text = before.text.replace(/#.*$/, "").trimEnd();
  const blank = before.text.match(/^ */)[0].length;
  if (/[:([{]$/.test(text)) return blank + 4;
  return /^\s*(return|raise|pass|break|continue)\b/.test(text) ? Math.max(blank - 4, 0) : blank;
});

const mark = StateEffect.define();
const line = Decoration.line({ class: "xt-bad-line" });
const gutterMark = new (class extends GutterMarker { elementClass = "xt-bad-line"; })();
const marked = StateField.define({
  create: () => [],
  update: (places, { changes, effects }) => {
    const fresh = effects.find((effect) => effect.is(mark));
    return fresh ? fresh.value : places.map((place) => changes.mapPos(place));
  },
  provide: (field) => [
    EditorView.decorations.compute([field, "doc"], (state) => ranges(state, field, line)),
    gutterLineClass.compute([field, "doc"], (state) => ranges(state, field, gutterMark)),
  ],
});

function ranges(state, field, value) {
  const starts = new Set(state.field(field).map((place) => state.doc.lineAt(place).from));
  return RangeSet.of([...starts].sort((a, b) => a - b).map((start) => value.range(start)));
}

/* An editor in `parent`; `change()` is called after an edit of the reader's. */
export function edit(parent, { text, label, describedby, change }) {
  const extensions = [
    lineNumbers(), history(), drawSelection(), highlightActiveLine(), bracketMatching(),
    indentUnit.of("    "), indents, EditorState.tabSize.of(4),
    LRLanguage.define({ parser, languageData: { commentTokens: { line: "#" } } }),
    syntaxHighlighting(COLOURS), LOOK, marked,
    keymap.of([{ key: "Mod-Enter", run: () => true }, indentWithTab, ...defaultKeymap, ...historyKeymap]),
    EditorView.contentAttributes.of({ "aria-label": label, "aria-describedby": describedby }),
    EditorView.updateListener.of((update) => {
      if (update.docChanged) change();
    }),
  ];
  const view = new EditorView({ parent, state: EditorState.create({ doc: text, extensions }) });
  return {
    get text() { return view.state.doc.toString(); },
    set text(fresh) {
      view.setState(EditorState.create({ doc: fresh, extensions }));
    },
    focus: () => view.focus(),
    mark(lines) {
      const known = lines.filter((number) => number >= 1 && number <= view.state.doc.lines);
      const places = known.map((number) => view.state.doc.line(number).from);
      view.dispatch({ effects: mark.of(places) });
      if (!places.length) return;
      const { top } = view.lineBlockAt(places[0]); // the page stays where it is
      view.scrollDOM.scrollTop = top - view.scrollDOM.clientHeight / 2;
    },
    remove: () => view.destroy(),
  };
}
