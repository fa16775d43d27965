/* A plain text field as the editor: for a copy of the site without CodeMirror, with the
   same function as `editor.mjs`. */

export function edit(parent, { text, label, describedby, change }) {
  const field = document.createElement("textarea");
  Object.assign(field, { value: text, spellcheck: false, className: "xt-plain" });
  for (const [key, value] of Object.entries({
    "aria-label": label, "aria-describedby": describedby, autocapitalize: "off", autocomplete: "off", wrap: "off",
  })) field.setAttribute(key, value);
  let leaves = false;
  field.addEventListener("input", change);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Tab" && !event.shiftKey && !leaves) {
      event.preventDefault();
      document.execCommand("insertText", false, "    ");
    }
    leaves = event.key === "Escape";
  });
  parent.append(field);
  return {
    get text() { return field.value; },
    set text(fresh) { field.value = fresh; },
    focus: () => field.focus(),
    mark(lines) { // the first of them is selected
      if (!lines.length) return;
      const before = field.value.split("\n").slice(0, lines[0] - 1).join("\n").length;
      const start = before + (lines[0] > 1 ? 1 : 0);
      field.setSelectionRange(start, (field.value + "\n").indexOf("\n", start));
    },
    remove: () => field.remove(),
  };
}
