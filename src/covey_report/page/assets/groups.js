"use strict";
// Groups of a step, their answers side by side, and every token by what the update did with it.
const SCHEMES = [["difference", "difference"], ["logprob", "log-prob"], ["advantage", "advantage"], ["ratio", "ratio"], ["mismatch", "mismatch"], ["entropy", "entropy"], ["kl", "KL"]];

function value(answer, k, scheme) {
  const at = (name) => (answer[name] ? answer[name][k] : null);
  if (answer.learnt[k] !== "1") return null;
  if (scheme === "logprob") return at("trainer_logprob") ?? at("sampler_logprob");
  if (scheme === "advantage") return answer.advantage;
  if (scheme === "ratio") return answer.ratio ? at("ratio") : answer.trainer_logprob ? 1 : null;
  if (scheme === "mismatch") return at("trainer_logprob") === null ? null : at("trainer_logprob") - at("sampler_logprob");
  return at(scheme);
}

// Where a value lies on its scale: sign and strength in [0, 1].
function scaleOf(trace, scheme) {
  if (scheme === "logprob") return { of: (v) => Math.min(1, -v / 5), text: "stronger: less likely, 0 to -5 nats" };
  let most = 0;
  trace.rollouts.forEach((answer) => answer.pieces.forEach((_, k) => { const v = value(answer, k, scheme); if (v !== null) most = Math.max(most, Math.abs(scheme === "ratio" ? Math.log(v) : v)); }));
  if (scheme === "entropy") return { of: (v) => v / (most || 1), text: "stronger: more entropy, up to " + shown(most) + " nats" };
  if (scheme === "kl") return { of: (v) => v / (most || 1), text: "stronger: further from the reference, up to " + shown(most) + " nats" };
  if (scheme === "ratio") return { signed: true, of: (v) => Math.log(v) / Math.max(most, .02), text: most ? "orange: the update made it likelier; blue: less likely; up to a factor of " + shown(Math.exp(most)) : "every ratio is 1: one update on this batch" };
  if (scheme === "mismatch") return { signed: true, of: (v) => v / (most || 1), text: "orange: likelier for the trainer than for the sampler; blue: less; up to " + shown(most) + " nats" };
  if (scheme === "advantage") return { signed: true, of: (v) => v / (most || 1), text: "orange: made likelier; blue: made less likely; up to " + shown(most) };
  return { of: () => 0, text: "underlined: not in the answer with the highest reward" + (trace.rollouts.some((answer) => answer.pieces.length > COMPARED) ? "; the first " + COMPARED + " tokens are compared" : "") };
}

function paint(span, v, scale) {
  if (v === null) return;
  const x = Math.max(-1, Math.min(1, scale.of(v)));
  const name = scale.signed ? (x >= 0 ? "--warm" : "--cool") : "--one";
  if (x) span.style.backgroundColor = "rgba(" + colour(name) + "," + (.08 + .55 * Math.abs(x)).toFixed(3) + ")";
}

function details(trace, answer, k) {
  const line = (name, v) => (v === null || v === undefined ? null : name + " " + shown(v, 4));
  const given = answer.learnt[k] !== "1";
  const rows = ["token " + (k + 1) + ", id " + answer.ids[k] + ", " + JSON.stringify(answer.pieces[k])];
  if (given) return rows.concat("not chosen by the policy").join("\n");
  const p = value(answer, k, "logprob");
  rows.push(line("probability", p === null ? null : Math.exp(p)), line("log-prob of the sampler", answer.sampler_logprob && answer.sampler_logprob[k]), line("log-prob of the trainer", answer.trainer_logprob && answer.trainer_logprob[k]),
    line("mismatch", value(answer, k, "mismatch")), line("ratio", value(answer, k, "ratio")), line("entropy", value(answer, k, "entropy")), line("KL", value(answer, k, "kl")), line("advantage", answer.advantage));
  if (!answer.trainer_logprob) rows.push("cost no pass: no gradient");
  return rows.filter(Boolean).join("\n");
}

function tip(text, x, y) {
  const box = document.getElementById("tip");
  box.classList.toggle("hidden", !text);
  if (!text) return;
  box.textContent = visible(text);
  box.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.offsetWidth - 8)) + "px";
  box.style.top = (y + 18 + box.offsetHeight > innerHeight ? y - box.offsetHeight - 12 : y + 18) + "px";
}

function spelled(piece) {
  if (piece === "") return "·";
  return piece.replace(/\n/g, "⏎\n");
}

function tokensOf(trace, answer, other, scale, from = 0, to = answer.pieces.length) {
  const made = h("div", { class: "text" + (state.numbers ? " numbers" : "") });
  answer.pieces.slice(from, to).forEach((piece, at) => {
    const k = from + at;
    const given = answer.learnt[k] !== "1", v = state.colour === "difference" ? null : value(answer, k, state.colour);
    const span = h("span", { class: "tok" + (given ? " given" : "") + (other.has(k) ? " other" : ""), "data-k": k }, spelled(piece));
    paint(span, v, scale);
    if (state.numbers) span.append(h("small", {}, v === null ? (state.colour === "difference" ? "" : "–") : shown(v, 2)));
    made.append(span);
  });
  const show = (event) => {
    const span = event.target.closest(".tok");
    if (span) tip(details(trace, answer, Number(span.dataset.k)), event.clientX, event.clientY); else tip("");
  };
  made.addEventListener("mousemove", show);
  made.addEventListener("click", show);
  made.addEventListener("mouseleave", () => tip(""));
  return made;
}

function answerOf(trace, answer, place, best, scale) {
  const head = h("h4", {}, h("b", {}, "answer " + (place + 1)), " · reward ", h("b", {}, shown(answer.reward)), (answer.advantage === null ? "" : " · A " + signed(answer.advantage)) + (answer.num === null ? "" : " · " + answer.num + (answer.num === 1 ? " token" : " tokens")) + (answer.finish === "length" ? ", cut" : "") + (answer === best ? " · best" : ""));
  const other = answer === best ? new Set() : differing(best.pieces, answer.pieces);
  const tokens = isDialogue(answer.text) && answer.pieces.length ? turnTokens(answer) : null;
  const strip = answer.pieces.length && !tokens ? tokensOf(trace, answer, other, scale) : null;
  const turns = isDialogue(answer.text) ? dialogue(answer.text, answer.turns, tokens, (from, to) => tokensOf(trace, answer, other, scale, from, to), "conversation of answer " + (place + 1)) : null;
  const traced = answer.learnt.split("1").length - 1, rest = answer.pieces.length && traced < answer.num ? h("p", { class: "soft row" }, "the first " + traced + " of its " + answer.num + " tokens were traced") : null;
  const body = strip || turns ? [strip, turns, rest] : h("div", { class: "text" }, written(answer.text));
  const more = Object.entries({ ...answer.parts, ...answer.extra });
  const below = more.length > 1 || Object.keys(answer.extra).length ? h("h4", {}, more.map(([name, v]) => name + " " + shown(v)).join(" · ")) : null;
  return h("article", { class: "answer", "data-answer": place, "aria-label": "answer " + (place + 1) + ", reward " + shown(answer.reward) }, head, body, turns && ended(answer) ? h("h4", {}, ended(answer)) : null, below);
}

function glyphs(rewards, range) {
  return h("span", { class: "glyphs", "aria-hidden": "true" }, squares(rewards, range[0], range[1]));
}

function rangeOf(run) {
  const all = run.groups.flatMap((row) => row.groups.flatMap(([, rewards]) => rewards)).concat(run.traces.flatMap((t) => t.rollouts.map((r) => r.reward)));
  const [low, high] = all.filter((v) => typeof v === "number").reduce(([least, most], v) => [Math.min(least, v), Math.max(most, v)], [0, 0]);
  return [low, high > low ? high : low + 1];
}

function groupsPage(run) {
  if (!run.traces.length) return h("p", {}, "No groups were traced: the run had output.traces=false, no step is finished, or the log is of another tool.");
  const steps = [...new Set(run.traces.map((t) => t.step))];
  const step = nearest(run.traces, state.step).step, range = rangeOf(run);
  const here = run.traces.filter((t) => t.step === step);
  state.trace = Math.min(state.trace, here.length - 1);
  const trace = here[state.trace];
  const slider = stepSlider(steps, step, (step) => set({ step, trace: 0, answer: 0 }));
  const scale = scaleOf(trace, state.colour);
  const list = h("ul", { class: "list" }, here.map((t, k) => h("li", {}, h("button", { type: "button", "aria-current": String(t === trace), onclick: () => set({ trace: k, answer: 0 }) },
    h("span", { class: "one-line" }, lastWords(written(t.prompt), 160)), glyphs(t.rollouts.map((r) => r.reward), range),
    h("span", { class: "soft one-line" }, (t.rollouts.length ? "mean " + shown(mean(t.rollouts.map((r) => r.reward))) + ", " : "") + t.reason)))));
  const best = trace.rollouts.reduce((a, b) => (b.reward > a.reward ? b : a), trace.rollouts[0]);
  const different = new Set(trace.rollouts.map((r) => written(r.text))).size;
  const means = trace.rollouts.length + " answers, " + different + " different" + (trace.dropped ? "; not trained: " + trace.dropped : new Set(trace.rollouts.map((r) => r.reward)).size < 2 ? "; no signal, rewards are equal" : "");
  const long = trace.rollouts.some((r) => r.pieces.length > 60);
  return h("div", {},
    h("div", { class: "bar" }, slider, buttons("colour by", SCHEMES, state.colour, (c) => set({ colour: c })),
      h("button", { type: "button", "aria-pressed": String(state.numbers), onclick: () => set({ numbers: !state.numbers }) }, "numbers")),
    h("p", { class: "legend" }, scale.text, ". ■ highest reward, □ lowest, ▣ between."),
    h("div", { class: "split" },
      h("section", { "aria-label": "groups" }, h("h3", {}, "traced groups of step " + step), list, allGroups(run, step, range)),
      h("section", { "aria-label": "answers" }, h("h3", {}, trace.id + ": " + means),
        textBox(trace.prompt, "prompt"),
        columnsLine(trace),
        trace.failures.length ? h("p", { class: "lost" }, "not scored: " + trace.failures.join("; ")) : null,
        h("div", { class: "answers" + (long ? " few" : "") }, trace.rollouts.map((answer, k) => answerOf(trace, answer, k, best, scale))))));
}

function columnsLine(trace) {
  const columns = Object.entries(trace.columns);
  return columns.length ? h("p", { class: "soft row" }, columns.map(([name, v]) => name + ": " + (v.length > 200 ? v.slice(0, 200) + "…" : v)).join(" · ")) : null;
}

function mean(values) {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

// All groups of the step by how far their rewards are apart.
function allGroups(run, step, range) {
  const row = nearest(run.groups, step);
  if (!row) return null;
  const spread = (rewards) => Math.max(...rewards) - Math.min(...rewards);
  const groups = [...row.groups].filter(([, rewards]) => rewards.length).sort((a, b) => spread(b[1]) - spread(a[1]) || mean(b[1]) - mean(a[1]));
  const without = groups.filter(([, rewards]) => spread(rewards) === 0).length;
  return h("details", { open: innerWidth > 760 }, h("summary", {}, "all " + row.num + " groups of step " + row.step + ": " + without + " of " + groups.length + " without signal"),
    h("ul", { class: "list", tabindex: 0 }, groups.map(([id, rewards]) => h("li", { class: "one-line soft" }, glyphs(rewards, range), " " + shown(mean(rewards), 2) + " " + id))));
}
