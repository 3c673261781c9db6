"use strict";
// The other pages.
function overview(run) {
  const shownRuns = DATA.compare ? DATA.runs : [run];
  const keys = DATA.compare ? h("div", { class: "keys" }, DATA.runs.map((one, k) => h("span", {}, svg("svg", { viewBox: "0 0 34 10" }, svg("line", { x1: 0, x2: 34, y1: 5, y2: 5, stroke: penOf(k)[0], "stroke-width": 2.5, "stroke-dasharray": penOf(k)[1].join(" ") })), one.name))) : null;
  if (!shownRuns.some((one) => one.curves.length)) return h("p", {}, run.verdict.state === "running" ? "No step is finished yet." : "The run ended before a step was finished.");
  return h("div", {}, keys, curvesOf(shownRuns), h("h2", {}, "How a step spreads"), histogramsOf(run));
}

function findingOf(one, all) {
  const after = all.filter((other) => other.cause === one.id);
  const list = (name, items) => [h("dt", {}, name), h("dd", {}, items)];
  const steps = one.look.length ? list("look at", one.look.map((step) => h("button", { type: "button", class: "plain", onclick: () => set({ tab: "groups", step, trace: 0, answer: 0 }) }, "groups of step " + step))) : null;
  return h("section", { class: "finding " + one.level }, h("h2", {}, h("span", { class: "state " + one.level }, one.level), one.id + " " + one.name),
    h("p", {}, one.title.slice(one.id.length + one.name.length + 1).replace(/^: /, "")),
    h("dl", {}, list("why", [one.why + " ", h("span", { class: "soft" }, "(" + one.source + ")")]), list("change", h("ol", {}, one.advice.map((text) => h("li", {}, text)))),
      list("refuted if", one.refuted), one.prompts.length ? list("prompts", one.prompts.join(", ")) : null, steps),
    after.length ? h("details", {}, h("summary", {}, "what follows from it: " + after.map((other) => other.id + " " + other.name).join(", ")), after.map((other) => findingOf(other, all))) : null);
}

function doctorPage(run) {
  const { findings, line, num_rules } = run.doctor;
  const about = num_rules + " rules looked at the numbers of this run; a finding needs two windows of steps in a row. sick: act now; watch: look again; note: know it.";
  return h("div", {}, h("p", { class: "verdict" }, line), h("p", { class: "soft" }, about), findings.filter((one) => one.cause === null).map((one) => findingOf(one, findings)));
}

const KIND_NAMES = { all: "all", gained: "gained", lost: "lost", "stayed the same": "stayed the same", "stayed right": "stayed right", "stayed wrong": "stayed wrong" };
const TAGS = { lost: "✗ lost", gained: "✓ gained", "stayed the same": "= same", "stayed wrong": "– wrong", "stayed right": "= right" };

function pairsPage(run) {
  const pairs = run.pairs;
  if (!pairs.rows.length) return h("p", {}, "There are no two evaluations of the same prompts to compare.");
  const rows = pairs.rows.filter((row) => state.kind === "all" || row.kind === state.kind);
  const total = Object.values(pairs.counts).reduce((a, b) => a + b, 0), counts = { all: total, ...pairs.counts };
  const kinds = Object.entries(KIND_NAMES).map(([kind, name]) => [kind, name + " " + (counts[kind] || 0)]);
  return h("div", {}, h("p", {}, "The same prompts, answered greedily " + (pairs.steps[0] ? "after step " + pairs.steps[0] : "before the first step") + " and after step " + pairs.steps[1] + ". " + (pairs.evaluated > total ? total + " of the " + pairs.evaluated + " prompts were kept (output.answers_per_evaluation). " : "") + (total > pairs.rows.length ? pairs.rows.length + " of " + total + " are on this page." : "")),
    h("div", { class: "bar" }, buttons("show", kinds, state.kind, (kind) => set({ kind }))),
    rows.length ? null : h("p", { class: "soft" }, "There are none."),
    h("div", { class: "pairs" }, rows.slice(0, 200).map((row) => h("div", { class: "pair" },
      h("div", {}, h("span", { class: "tag " + (row.kind === "lost" ? "lost" : row.kind === "gained" ? "shown" : "soft") }, TAGS[row.kind]), h("h4", {}, row.id)),
      h("div", {}, h("h4", {}, "prompt"), h("div", { class: "text" }, written(row.prompt)), h("h4", {}, Object.entries(row.columns).map(([name, v]) => name + ": " + v.slice(0, 120)).join(" · "))),
      h("div", {}, h("h4", {}, "before, reward " + shown(row.before.reward)), pairText(row.before.text, null)),
      h("div", {}, h("h4", {}, "after, reward " + shown(row.after.reward)), pairText(row.after.text, row.before.text))))),
    rows.length > 200 ? h("p", { class: "soft" }, "200 of " + rows.length + " are drawn; the kinds above narrow them.") : null);
}

// An answer, or a conversation turn by turn, with marks where it differs from the one before.
function pairText(text, before) {
  const policy = (turns) => turns.filter((turn) => turn.role === "assistant").map((turn) => turn.content);
  if (isDialogue(text)) return dialogue(text, [], null, null, "conversation", isDialogue(before) ? policy(before) : null);
  return before === null ? h("div", { class: "text" }, written(text)) : marked(text, before);
}

function interval(values, factor) {
  if (values[0] === null) return "–";
  if (values[1] === null) return (values[0] > 0 ? "+" : "") + (factor * values[0]).toFixed(factor === 1 ? 3 : 1);
  const [v, low, high] = values.map((x) => (factor * x).toFixed(factor === 1 ? 3 : 1));
  return (v > 0 ? "+" : "") + v + " [" + low + ", " + high + "]";
}

function comparePage() {
  const compare = DATA.compare;
  const names = [...new Set(compare.gains.flatMap((one) => Object.keys(one.measures)))], percent = (name) => (name === "reward_mean" ? 1 : 100);
  const cell = (one, name) => h("td", { class: "number" }, one.measures[name] ? interval(one.measures[name], percent(name)) : "–");
  return h("div", {},
    h("h2", {}, "Last evaluations, prompt by prompt, against " + compare.base),
    h("p", { class: "soft" }, "Runs that differ only in the seed are one group. Where both sides have several, the intervals hold what other seeds would change; a single run's do not."),
    h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["runs", "shared prompts", ...names.map((name) => (name === "reward_mean" ? "mean reward [95 %]" : name + ", points [95 %]")), "reading"].map((t) => h("th", {}, t)))),
      h("tbody", {}, compare.gains.map((one) => h("tr", {}, h("td", {}, one.name), h("td", { class: "number" }, one.num_prompts), names.map((name) => cell(one, name)), h("td", { class: one.state }, one.words)))))),
    h("h2", {}, "Settings that differ"),
    compare.settings.length ? h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "setting"), DATA.runs.map((run) => h("th", {}, run.name)))),
      h("tbody", {}, compare.settings.map(([name, values]) => h("tr", {}, h("td", {}, name), values.map((v) => h("td", {}, v))))))) : h("p", {}, "None."));
}

function timePage(run) {
  if (!run.phases.length) return h("p", {}, "A run under way has no table of phases yet; seconds a step are on the first page.");
  const [first] = run.phases;
  return h("div", {}, h("p", {}, "The longest part was " + first[0] + ": " + (100 * first[2]).toFixed(0) + " % of the time."),
    run.phases.map(([name, seconds, share]) => {
      const bar = h("i", {});
      bar.style.width = Math.max(.2, 100 * share) + "%";
      return h("div", { class: "phase" }, h("span", {}, name), h("span", {}, shown(seconds) + " s"), h("span", {}, (100 * share).toFixed(1) + " %"), h("span", {}, bar));
    }), plannedTable(run.planned));
}

function plannedTable(planned) {
  if (!planned) return h("p", { class: "soft" }, "covey plan with these settings, run before, would be compared here.");
  const part = (plan, taken) => (plan && taken !== null ? (plan > taken ? "+" : "") + (100 * (plan / taken - 1)).toFixed(0) + " %" : "–");
  return h("div", {}, h("h2", {}, "Planned and taken"), h("p", { class: "soft" }, "The plan rests on " + planned.source + "."),
    h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["what", "planned", "taken", "plan off by"].map((t) => h("th", {}, t)))),
      h("tbody", {}, planned.rows.map(([name, plan, taken]) => h("tr", {}, h("td", {}, name), h("td", { class: "number" }, shown(plan)), h("td", { class: "number" }, shown(taken)), h("td", { class: "number" }, part(plan, taken))))))));
}

// What a grader pays: a row for each kind of answer, with a witness of what it judged wrongly.
function auditPage(audit) {
  const share = (v) => (v === null ? "–" : (100 * v).toFixed(0) + " %");
  const row = (one) => h("tr", {}, h("td", {}, one.what), h("td", {}, one.must_be_paid ? "paid" : "unpaid"), h("td", { class: "number" }, String(one.cases)), h("td", { class: one.wrong ? "number lost" : "number" }, String(one.wrong)), h("td", { class: "number" }, share(one.low) + " to " + share(one.high)), h("td", { class: "number" }, shown(one.mean_reward)), h("td", { class: "text" }, one.witness));
  return h("div", {}, h("p", {}, "What the grader pays for answers that graders are known to judge wrongly, of " + audit.rows + " rows; mean reward: 0 is what an empty answer earns, 1 what the right one does."),
    h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["answer", "must be", "cases", "wrong", "95 %", "mean reward", "for example"].map((t) => h("th", {}, t)))), h("tbody", {}, audit.kinds.map(row)))),
    audit.remarks.map((line) => h("p", { class: "lost" }, line)), audit.seconds.median === null ? null : h("p", { class: "soft" }, "A verdict takes " + shown(1000 * audit.seconds.median) + " ms in the median, " + shown(1000 * audit.seconds.p99) + " ms at p99."));
}

// A dotted name, which may be broken after a dot or a dash below where a table is narrow.
function dotted(name) {
  return name.split(/(?<=[._])/).flatMap((part) => [part, h("wbr", {})]);
}

// What was typed first, then what the recipe chose, what covey fitted to both, and in a fold what is as by default.
function settingsPage(run) {
  const table = (rows, heads) => h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((t) => h("th", {}, t)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((v) => h("td", {}, v)))))));
  const { recipe, presets, file, rows } = run.settings, of = (origin) => rows.filter((row) => row[4] === origin);
  const base = [recipe ? "recipe " + recipe : "", ...presets].filter(Boolean).join(", "), known = base || (recipe === "" && of("own").length);
  const own = of("own"), chosen = of("recipe"), fitted = of("fitted"), rest = of("default");
  const section = (list, title, about, heads, pick) => (list.length ? [h("h2", {}, title), about ? h("p", { class: "soft" }, about) : null, table(list.map(pick), heads)] : null);
  const yours = (name) => [h("span", { class: "state own" }, "own"), dotted(name)];
  return h("div", {}, file ? h("p", {}, "The run began with the settings of " + file + ".") : null,
    known && !own.length ? h("h2", {}, "No setting differs from " + (base || "the defaults") + " by the user's own choice") : null,
    section(own, own.length + (own.length === 1 ? " setting is" : " settings are") + " the user's own", "Typed for this run" + (base ? ", and other than " + base + " has them." : "."), base ? ["setting", "value", "recipe", "default"] : ["setting", "value", "default"],
      ([name, value, d, b]) => (base ? [yours(name), value, b, d] : [yours(name), value, d])),
    section(chosen, chosen.length + (chosen.length === 1 ? " setting comes" : " settings come") + " from " + base, "", ["setting", "value", "default"], ([name, value, d]) => [dotted(name), value, d]),
    section(fitted, fitted.length + (fitted.length === 1 ? " setting differs" : " settings differ") + " from " + (base || "the defaults") + (known ? " without having been typed" : ""),
      known ? "A file, a program, or what gives way to other settings: covey.log says which." : "", base ? ["setting", "value", "recipe", "default"] : ["setting", "value", "default"],
      ([name, value, d, b]) => (base ? [dotted(name), value, b, d] : [dotted(name), value, d])),
    h("details", {}, h("summary", {}, rest.length + " settings are as by default"), table(rest.map(([n, v]) => [dotted(n), v]), ["setting", "value"])),
    h("h2", {}, "Versions"), table(Object.entries(run.versions), ["what", "version"]));
}

function environmentPage(run) {
  const page = run.environment;
  if (page.kind === "conversations") return conversationsPage(run);
  if (page.kind === "machines") return machinesPage(page);
  return h("div", {}, h("p", {}, "Programs of the last evaluation, from the best to the worst, with the tests that judged them."), page.items.map(program));
}

function program(one) {
  const parts = Object.entries(one.parts).map(([name, v]) => " · " + name.replace(/_/g, " ") + " " + shown(v)).join("");
  return h("section", { class: "program" }, h("h3", {}, one.id + ": reward " + shown(one.reward) + parts),
    h("div", { class: "hist" }, h("div", {}, textBox(one.prompt, "prompt"), isDialogue(one.text) ? dialogue(one.text, [], null, null, "program, turn by turn") : textBox(one.text, "program")), h("div", {}, casesOf(one))),
    Object.entries(one.tests).map(([name, text]) => [h("p", { class: "soft" }, name), textBox(text, name)]));
}

const VERDICTS = { passed: "✓ passed", wrong: "✗ wrong answer", error: "✗ raised", timeout: "✗ too slow", crash: "✗ crashed", output: "✗ too much output", load: "✗ does not load", channel: "✗ no answer", not_run: "– not run" };

function casesOf(one) {
  if (!one.cases.length) return null;
  const verdict = (k) => (one.verdicts[k] ? h("td", { class: one.verdicts[k] === "passed" ? "shown" : "lost" }, VERDICTS[one.verdicts[k]] || one.verdicts[k]) : h("td", { class: "soft" }, "–"));
  const rows = one.cases.map(([call, expected], k) => h("tr", {}, h("td", { class: "text" }, one.entry + "(" + call + ")"), h("td", { class: "text" }, expected), verdict(k)));
  const few = one.num_cases > one.cases.length ? h("p", { class: "soft" }, one.cases.length + " of " + one.num_cases + " tests") : null;
  return [h("div", { class: "wide" }, h("table", { "aria-label": "tests" }, h("thead", {}, h("tr", {}, ["test", "expected", "verdict"].map((t) => h("th", {}, t)))), h("tbody", {}, rows))),
    one.failure ? h("p", { class: "lost" }, "first failure: " + one.failure) : null, one.verdicts.length ? null : h("p", { class: "soft" }, "No program was found to run the tests on, or the log has no verdicts of single tests."), few];
}
