"use strict";
// Small tools. What a model wrote reaches the page through textContent alone.
const DATA = JSON.parse(document.getElementById("data").textContent);
const state = { run: 0, tab: "overview", step: null, trace: 0, answer: 0, token: -1, colour: "difference", numbers: false, kind: "all", hist: "reward", moment: 0, theme: "" };
const KEEP = ["run", "tab", "step", "trace", "answer", "colour", "numbers", "kind", "hist", "moment", "theme"];
// All that has no glyph: controls, marks of direction, tags, halves of pairs, separators of lines.
const HIDDEN = /(?![\t\n])[\p{C}\p{Zl}\p{Zp}]/gu;

function visible(text) {
  const spelled = (code) => (code.length > 4 ? "\\U" + code.padStart(8, "0") : "\\u" + code.padStart(4, "0"));
  return String(text).replace(HIDDEN, (c) => spelled(c.codePointAt(0).toString(16)));
}

function h(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children.flat());
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function shown(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e3 && size < 1e5) return String(Math.round(value));
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(digits)));
}

// Numbers beside an axis, with as many digits as tell them apart.
function labels(ticks) {
  const told = [...new Set(ticks.filter((t) => t !== null))];
  const digits = [3, 4, 5, 6, 7, 8].find((n) => new Set(told.map((t) => shown(t, n))).size === told.length);
  return ticks.map((t) => (t === null ? "" : shown(t, digits)));
}

function signed(value) {
  return value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + shown(value);
}

function written(text) {
  return Array.isArray(text) ? text.map((turn) => turn.role + ": " + turn.content).join("\n") : String(text ?? "");
}

// A text, or a conversation turn by turn.
function textBox(text, label) {
  const parts = Array.isArray(text) ? text.map((turn) => [h("span", { class: "role" }, turn.role), h("div", { class: "text" }, turn.content)]) : h("div", { class: "text" }, text ?? "");
  return h("div", { class: "box", tabindex: 0, role: "group", "aria-label": label }, parts);
}

// The end of a text, from a whole word on.
function lastWords(text, most) {
  return text.length > most ? "…" + text.slice(-most).replace(/^\S*\s+(?=\S)/, "") : text;
}

// Items that are compared: time and memory grow with their square.
const COMPARED = 700;

// Which items of `items` are not in a longest common subsequence with `base`.
function differing(base, items) {
  const n = Math.min(base.length, COMPARED), m = Math.min(items.length, COMPARED);
  const table = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
  for (let i = n - 1; i >= 0; i--)
    for (let j = m - 1; j >= 0; j--)
      table[i][j] = base[i] === items[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
  const other = new Set();
  let i = 0, j = 0;
  while (j < m) {
    if (i < n && base[i] === items[j]) { i++; j++; }
    else if (i < n && table[i + 1][j] >= table[i][j + 1]) i++;
    else other.add(j++);
  }
  return other;
}

function words(text) {
  const all = written(text);
  return all.length < 40 ? Array.from(all) : all.match(/\s+|\w+|[^\s\w]/g) || [];
}

// A text with marks where it differs from another.
function marked(text, base) {
  const own = words(text), other = differing(words(base), own);
  const parts = [];
  own.forEach((word, place) => {
    const last = parts[parts.length - 1], is = other.has(place);
    if (last && last.is === is) last.text += word;
    else parts.push({ is, text: word });
  });
  return h("div", { class: "text" }, parts.map((part) => (part.is ? h("mark", {}, part.text) : part.text)));
}

function buttons(label, choices, current, choose) {
  return h("span", { class: "group-of-buttons", role: "group", "aria-label": label },
    choices.map(([value, name]) => h("button", { type: "button", "aria-pressed": String(value === current), onclick: () => choose(value) }, name)));
}

// Draws anew where it is let go: what is drawn in the place of a slider that is being dragged would end that.
function stepSlider(steps, step, choose) {
  const said = h("span", {}, "step " + step + " "), at = (event) => steps[Number(event.target.value)];
  const slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: steps.indexOf(step), "aria-label": "step", "aria-valuetext": String(step), oninput: (event) => { said.textContent = "step " + at(event) + " "; }, onchange: (event) => choose(at(event)) });
  return h("label", {}, said, slider);
}

function squares(rewards, low, high) {
  return rewards.map((r) => (r >= high ? "■" : r <= low ? "□" : "▣")).join("");
}
