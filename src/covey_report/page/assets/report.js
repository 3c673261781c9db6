"use strict";
// Which page is shown of which run, and the keys. The address after # says where one is, also after a reload.
function tabs() {
  const run = DATA.runs[state.run];
  const found = [["overview", "Overview", overview], ["groups", "Groups and tokens", groupsPage], ["pairs", "Before and after", pairsPage]];
  if (run.environment) found.push(["environment", { machines: "Machines", conversations: "Conversations" }[run.environment.kind] || "Programs", environmentPage]);
  found.push(["doctor", "Doctor" + (run.doctor.findings.length ? " " + run.doctor.findings.length : ""), doctorPage]);
  if (run.audit) found.push(["audit", "Audit", () => auditPage(run.audit)]);
  if (DATA.compare) found.push(["compare", "Compare", comparePage]);
  return found.concat([["time", "Time", timePage], ["settings", "Settings", settingsPage]]);
}

function set(changes, redraw = true) {
  Object.assign(state, changes);
  const words = KEEP.filter((name) => state[name] !== null && state[name] !== "").map((name) => name + "=" + encodeURIComponent(state[name]));
  history.replaceState(null, "", "#" + words.join("&"));
  if (redraw || changes.step) draw();
}

function restore() {
  for (const [name, read] of new URLSearchParams(location.hash.slice(1))) {
    if (!KEEP.includes(name)) continue;
    const was = state[name];
    state[name] = typeof was === "number" || name === "step" ? Math.max(0, Number(read) || 0) : typeof was === "boolean" ? read === "true" : read;
  }
  state.run = Math.min(Math.max(0, state.run), DATA.runs.length - 1);
}

function head() {
  const run = DATA.runs[state.run], place = document.getElementById("runs");
  const isSick = run.doctor.findings.some((one) => one.level === "sick");
  const choose = DATA.runs.length > 1 ? h("div", { class: "bar" }, buttons("run", DATA.runs.map((one, k) => [k, one.name]), state.run, (k) => set({ run: k, step: null, trace: 0 }))) : h("p", { class: "soft" }, run.title);
  const against = DATA.compare ? [h("p", { class: "soft" }, DATA.compare.together || "")].concat(DATA.compare.gains.map((one) => h("p", { class: "verdict" }, h("span", { class: "state " + one.state }, one.words), one.lines.slice(0, 2).join("; ")))) : [];
  place.replaceChildren(...against, choose, h("p", { class: "verdict" }, h("span", { class: "state " + run.verdict.state }, run.verdict.badge), run.verdict.text),
    h("p", { class: isSick ? "verdict" : "soft" }, isSick ? h("span", { class: "state sick" }, "sick") : null, "Doctor: ", h("button", { type: "button", class: "link", onclick: () => set({ tab: "doctor" }) }, run.doctor.line)),
    h("p", { class: "facts" }, run.facts.map(([name, text]) => h("span", { class: name }, name + " ", h("b", {}, text)))));
}

function draw() {
  const all = tabs(), chosen = all.find(([name]) => name === state.tab) || all[0];
  const giveBack = focused();
  tip("");
  clearCharts();
  stopMachines();
  head();
  document.getElementById("tabs").replaceChildren(...all.map(([name, title]) => h("button", { type: "button", role: "tab", id: "tab-" + name, "aria-selected": String(name === chosen[0]), tabindex: name === chosen[0] ? 0 : -1, onclick: () => set({ tab: name }) }, title)));
  const tab = document.getElementById("tab-" + chosen[0]), bar = tab.parentElement;
  bar.scrollLeft = Math.max(0, tab.offsetLeft + tab.offsetWidth - bar.offsetLeft - bar.clientWidth + 16);
  const page = document.getElementById("page");
  page.setAttribute("role", "tabpanel");
  page.setAttribute("aria-labelledby", "tab-" + chosen[0]);
  page.replaceChildren(chosen[2](DATA.runs[state.run]));
  giveBack();
  mark();
}

// What gives the focus to what stands in the place of the element that has it, once that is drawn anew.
function focused() {
  const had = document.activeElement, name = (one) => one.id || one.getAttribute("aria-label") || one.textContent;
  const alike = () => [...document.querySelectorAll(had.tagName)], place = alike().indexOf(had), label = name(had), isTab = had.getAttribute("role") === "tab";
  return () => {
    if (had.isConnected) return;
    const found = alike();
    const next = isTab ? document.querySelector("[aria-selected=true]") : [found[place], ...found].find((one) => one && name(one) === label);
    if (next) next.focus({ preventScroll: true });
  };
}

function mark() {
  document.querySelectorAll(".answer").forEach((card, k) => card.setAttribute("aria-current", String(k === state.answer && state.token >= -1 && state.moved === true)));
}

// The reader's choice, which outlasts a reload, else what the system prefers.
function theme() {
  const name = state.theme === "dark" || state.theme === "light" ? state.theme : matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "light" : "dark";
}

function move(step) {
  const cards = document.querySelectorAll(".answer");
  if (!cards.length) return;
  state.moved = true;
  state.answer = Math.max(0, Math.min(cards.length - 1, state.answer + step));
  state.token = -1;
  mark();
  cards[state.answer].scrollIntoView({ block: "nearest" });
}

function moveToken(step) {
  const card = document.querySelectorAll(".answer")[state.answer];
  const all = card ? card.querySelectorAll(".tok") : [];
  if (!all.length) return;
  all.forEach((one) => one.classList.remove("here"));
  state.moved = true;
  state.token = Math.max(0, Math.min(all.length - 1, state.token + step));
  const here = all[state.token];
  here.classList.add("here");
  here.scrollIntoView({ block: "nearest" });
  const box = here.getBoundingClientRect();
  here.dispatchEvent(new MouseEvent("mousemove", { bubbles: true, clientX: box.left, clientY: box.bottom }));
  mark();
}

function stepBy(by) {
  const run = DATA.runs[state.run], rows = ["groups", "environment"].includes(state.tab) ? run.traces : run.histograms[state.hist] || [];
  const steps = [...new Set(rows.map((row) => row.step))];
  if (!steps.length) return;
  const at = steps.indexOf(nearest(rows, state.step).step);
  set({ step: steps[Math.max(0, Math.min(steps.length - 1, at + by))], trace: 0, answer: 0 });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || (event.target.type === "range" && event.key.startsWith("Arrow"))) return;
  const all = tabs(), at = all.findIndex(([name]) => name === state.tab), onTab = event.target.getAttribute("role") === "tab";
  const schemes = SCHEMES.map(([name]) => name);
  const actions = {
    j: () => move(1), k: () => move(-1), n: () => set({ trace: state.trace + 1, answer: 0 }), p: () => set({ trace: Math.max(0, state.trace - 1), answer: 0 }),
    t: () => set({ colour: schemes[(schemes.indexOf(state.colour) + 1) % schemes.length] }), "[": () => stepBy(-1), "]": () => stepBy(1),
    ArrowRight: () => (onTab ? set({ tab: all[(at + 1) % all.length][0] }) : moveToken(1)), ArrowLeft: () => (onTab ? set({ tab: all[(at + all.length - 1) % all.length][0] }) : moveToken(-1)), Escape: () => tip(""),
  };
  const page = all[Number(event.key) - 1];
  const action = page && event.key !== " " ? () => set({ tab: page[0] }) : actions[event.key];
  if (action && (onTab || !event.key.startsWith("Arrow") || state.tab === "groups" || state.tab === "environment")) { event.preventDefault(); action(); }
});
document.getElementById("theme").addEventListener("click", () => { state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; theme(); set({}); });
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(draw, 150); });
function arrive() {
  restore();
  theme();
  draw();
}
addEventListener("hashchange", arrive);
arrive();
