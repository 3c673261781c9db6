"use strict";
// Conversations turn by turn: policy turns token by token, what environment and tools said as text.
const ENDS = { completed: "the environment ended it", tool_stopped: "a tool ended it", max_turns: "out of turns", max_tokens: "out of tokens", max_context: "out of context", max_tool_calls: "out of tool calls", parse_error: "an answer could not be read", timeout: "out of time" };

function isDialogue(text) {
  return Array.isArray(text) && text.length > 1;
}

function roleOf(turn) {
  const name = turn.name ? " " + turn.name : "";
  return ({ assistant: "policy", user: "environment" }[turn.role] || turn.role) + name;
}

// The tokens of each policy turn as [from, to); null where they cannot be told apart.
function turnTokens(answer) {
  const said = answer.text.filter((turn) => turn.role === "assistant").length, found = [];
  const learnt = Array.from(answer.learnt, (flag) => flag === "1");
  const counts = answer.turns.map((turn) => turn.num);
  if (counts.length === said && counts.every((num) => num > 0)) {
    const own = learnt.flatMap((is, k) => (is ? [k] : []));
    let start = 0;
    for (const num of counts) {
      const of = own.slice(start, start + num);
      found.push(of.length ? [of[0], of[of.length - 1] + 1] : null);
      start += num;
    }
    return found;
  }
  learnt.forEach((is, k) => { if (is && !learnt[k - 1]) found.push([k, k + 1]); else if (is) found[found.length - 1][1] = k + 1; });
  return found.length <= said ? found : null;
}

function turnHead(turn, number, own) {
  const parts = [h("b", {}, roleOf(turn))];
  if (number) parts.push(" · turn " + number);
  if (own && own.num) parts.push(" · " + own.num + (own.num === 1 ? " token" : " tokens"));
  if (own && own.reward) parts.push(" · reward ", h("b", {}, signed(own.reward)));
  if (own && own.void) parts.push(" · neither call nor answer");
  if (!number) parts.push(" · not learnt");
  return h("div", { class: "role" }, parts);
}

// A conversation. `draw(from, to)` draws the tokens of a policy turn; without it, and for what is cut off, it is text.
function dialogue(text, turns, tokens, draw, label, marks) {
  let number = 0;
  const items = text.map((turn) => {
    const isPolicy = turn.role === "assistant", own = isPolicy ? turns[number] : null, range = isPolicy && tokens ? tokens[number] : null, base = isPolicy && marks ? marks[number] : null;
    if (isPolicy) number += 1;
    const body = range && draw ? draw(range[0], range[1]) : typeof base === "string" ? marked(turn.content, base) : h("div", { class: "text" }, turn.content === "" && !turn.calls ? "(nothing)" : turn.content);
    return h("li", { class: isPolicy ? "turn policy" : "turn" }, turnHead(turn, isPolicy ? number : 0, own), body, turn.calls ? h("div", { class: "text soft" }, "calls " + turn.calls) : null, own && own.info ? h("div", { class: "soft" }, own.info) : null);
  });
  return h("ol", { class: "dialogue", tabindex: 0, "aria-label": label }, items);
}

function ended(answer) {
  const words = answer.stop ? ENDS[answer.stop] || answer.stop : answer.finish === "length" ? "cut by the token limit" : answer.finish === "stop" ? "the policy stopped" : "";
  return words ? "ended: " + words : "";
}

function counted(names) {
  const of = new Map();
  names.forEach((name) => of.set(name, (of.get(name) || 0) + 1));
  return [...of].sort((a, b) => b[1] - a[1]).map(([name, count]) => count + " × " + name).join(" · ");
}

function policyTurns(answer) {
  return answer.text.filter((turn) => turn.role === "assistant").length;
}

function conversationsPage(run) {
  const traces = run.traces.filter((trace) => trace.rollouts.some((one) => isDialogue(one.text)));
  const steps = [...new Set(traces.map((trace) => trace.step))], step = nearest(traces, state.step).step;
  const here = traces.filter((trace) => trace.step === step), scale = (trace) => scaleOf(trace, state.colour);
  const all = here.flatMap((trace) => trace.rollouts.filter((one) => Array.isArray(one.text)));
  const won = (least) => all.filter((one) => policyTurns(one) === least).map((one) => one.reward).filter((v) => typeof v === "number");
  const lengths = [...new Set(all.map(policyTurns))].sort((a, b) => a - b);
  const slider = stepSlider(steps, step, (step) => set({ step, trace: 0, answer: 0 }));
  return h("div", {},
    h("div", { class: "bar" }, slider, buttons("colour by", SCHEMES, state.colour, (c) => set({ colour: c })), h("button", { type: "button", "aria-pressed": String(state.numbers), onclick: () => set({ numbers: !state.numbers }) }, "numbers")),
    h("p", {}, all.length + " conversations of step " + step + " were traced, " + shown(mean(all.map(policyTurns)), 2) + " turns of the policy on average. " + (counted(all.map((one) => ended(one).slice(7)).filter(Boolean)) || "") + "."),
    h("div", { class: "wide" }, h("table", { "aria-label": "by turns" }, h("thead", {}, h("tr", {}, ["turns of the policy", "conversations", "mean reward"].map((t) => h("th", {}, t)))),
      h("tbody", {}, lengths.map((n) => h("tr", {}, h("td", { class: "number" }, n), h("td", { class: "number" }, all.filter((one) => policyTurns(one) === n).length), h("td", { class: "number" }, won(n).length ? shown(mean(won(n)), 2) : "–")))))),
    h("p", { class: "legend" }, scale(here[0]).text, ". Below, the best and the worst conversation of each traced group; the others are under Groups and tokens."),
    here.map((trace, k) => {
      const sorted = [...trace.rollouts].sort((a, b) => b.reward - a.reward), two = [...new Set([sorted[0], sorted[sorted.length - 1]])];
      return h("section", {}, h("h3", {}, trace.id + ": ", h("button", { type: "button", class: "link", onclick: () => set({ tab: "groups", trace: run.traces.filter((t) => t.step === step).indexOf(trace), answer: 0 }) }, "all " + trace.rollouts.length + " answers")),
        textBox(trace.prompt, "prompt of group " + (k + 1)), columnsLine(trace),
        h("div", { class: "answers few" }, two.map((answer) => answerOf(trace, answer, trace.rollouts.indexOf(answer), sorted[0], scale(trace)))));
    }));
}
