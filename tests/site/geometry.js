/* What is wrong with the places of a page's texts: two that overlap, one that is cut.
   The body of a function: arguments[0] is true if folds are to be opened first. */
const root = document.documentElement;
const screenWide = root.clientWidth; // a phone's innerWidth grows with what is too wide
if (arguments[0]) for (const fold of document.querySelectorAll("details")) fold.open = true;
if (!document.getElementById("xt-all")) {
  const style = document.createElement("style");
  style.id = "xt-all"; // blocks far off the screen are laid out, and nothing moves
  style.textContent = "* { content-visibility: visible !important; contain-intrinsic-size: none !important;"
    + " transition: none !important; animation: none !important }";
  document.head.append(style);
}

/* Each piece of text with its rectangles, cut to what its scrollers and frames show. */
const SLACK = 2; // glyphs are lower than their line
const pieces = [], problems = [];
/* Lines of code scroll in their block; a drawer is closed; a formula is drawn by hand. */
const UNREAD = "[aria-hidden=true]:not(svg), .md-search, .md-skip, pre, math"
  + (screenWide < 1220 ? ", .md-sidebar" : "");
const name = (text) => text.trim().replace(/\s+/g, " ").slice(0, 40);
const clipping = new Map();
function frame(element) {
  if (clipping.has(element)) return clipping.get(element);
  let box = null;
  if (element && element !== root && element !== document.body) {
    box = frame(element.parentElement);
    const style = getComputedStyle(element);
    if (style.position === "fixed") box = { left: -1e6, right: 1e6, top: -1e6, bottom: 1e6, fixed: true, scrolls: false, element: null };
    const clips = style.overflowX !== "visible" || style.overflowY !== "visible";
    if (clips && !(element instanceof SVGElement)) {
      const own = element.getBoundingClientRect();
      const scrolls = /auto|scroll/.test(style.overflowX + style.overflowY);
      box = {
        left: Math.max(box.left, own.left), right: Math.min(box.right, own.right),
        top: Math.max(box.top, own.top), bottom: Math.min(box.bottom, own.bottom),
        scrolls: box.scrolls || scrolls, fixed: box.fixed,
      };
    }
  }
  box ??= { left: -1e6, right: 1e6, top: -1e6, bottom: 1e6, scrolls: false, fixed: false };
  clipping.set(element, box);
  return box;
}

const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const range = document.createRange();
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement;
  if (!node.data.trim() || /^(SCRIPT|STYLE|NOSCRIPT|TEMPLATE|TITLE|DESC)$/i.test(element.tagName)) continue;
  if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
  const style = getComputedStyle(element);
  if (style.clipPath !== "none" || style.clip !== "auto") continue; // for readers alone
  if (element.closest(UNREAD)) continue;
  range.selectNodeContents(node);
  const box = frame(element);
  for (const { left, right, top, bottom, width, height } of range.getClientRects()) {
    if (width < 1 || height < 1) continue;
    const shown = {
      left: Math.max(left, box.left), right: Math.min(right, box.right),
      top: Math.max(top, box.top), bottom: Math.min(bottom, box.bottom),
      element, text: node.data, fixed: box.fixed,
    };
    const cut = right > box.right + SLACK || left < box.left - SLACK
      || bottom > box.bottom + height / 2 || top < box.top - height / 2;
    if (cut && !box.scrolls && style.textOverflow !== "ellipsis" && !box.fixed) problems.push(`cut: ${name(node.data)}`);
    if (!box.scrolls && !box.fixed && right > screenWide + SLACK) problems.push(`off the screen: ${name(node.data)}`);
    if (!box.scrolls && !box.fixed && left < -SLACK) problems.push(`off the screen, left: ${name(node.data)}`);
    if (shown.right - shown.left > SLACK && shown.bottom - shown.top > SLACK) pieces.push(shown);
  }
}

/* Two texts overlap if a good part of a glyph of one lies on the other. */
const flows = (a, b) => a.element === b.element || a.element.contains(b.element) || b.element.contains(a.element);
pieces.sort((a, b) => a.top - b.top);
let open = [];
for (const one of pieces) {
  const line = one.bottom - one.top;
  open = open.filter((other) => other.bottom > one.top + SLACK);
  for (const other of open) {
    const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    const least = 0.3 * Math.min(line, other.bottom - other.top);
    if (wide > SLACK && high > Math.max(least, SLACK) && one.fixed === other.fixed && !flows(one, other)) {
      problems.push(`overlap: ${name(one.text)} | ${name(other.text)}`);
    }
  }
  open.push(one);
}

/* Labels of figures are read as they are drawn. */
for (const label of document.querySelectorAll("main svg text")) {
  if (!label.textContent.trim() || !label.checkVisibility()) continue;
  const matrix = label.getScreenCTM();
  const size = parseFloat(getComputedStyle(label).fontSize) * Math.hypot(matrix.b, matrix.d);
  if (size < 9.9) problems.push(`small: ${size.toFixed(1)} px: ${name(label.textContent)}`);
}
return [...new Set(problems)];
