"use strict";
// Texts of runs become text nodes, never HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
// For a white and a black page.
const COLORS = ["#2f81e0", "#e0701a", "#1a9a6c", "#d0519a", "#8a6fe0", "#a98307", "#238ca2", "#b34a3c"];
const SECTIONS = [
  ["Reward", [/^reward\/mean$/, /^reward\//]],
  ["Held-out rows", [/^test\/(?!(.+\/)?(rollout|tokens))/]],
  ["Rollouts", [/^rollout\/(length|truncated|teaching|failed|turns)$/]],
  ["Policy", [/^actor\/(loss|.*kl|entropy|grad_norm|clip_ratio|accuracy|margin)$/, /^critic\//]],
  ["Engine and trainer", [/^actor\/(mismatch|effective)/]],
  ["Sources", [/^sources\//]],
  ["Time and memory", [/^time\/step$/, /^(time|memory)\//, /^tokens\/per_second$/]],
  ["Others", [/./]],
];
// Their charts reach from 0 to 1. A reward is one if all its values are between these.
const SHARES = /(^|[/])(truncated|failed|teaching|zero_variance|filtered|accuracy|(avg|pass|maj)@\d+)$/;
const REWARDS = /(^|[/])reward[/](?!std$)/;
const CONFIDENCE = 1.96; // standard errors: 95%
const LONG_TEXT = 1200; // characters; a longer turn is folded
const CARDS_A_PAGE = 48;
const CHART = { width: 360, height: 166 };

const byId = (id) => document.getElementById(id);
const isNumber = (value) => typeof value === "number";
const union = (lists) => [...new Set(lists.flat())];
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const sorted = (list, key) => list.map((item) => [key(item), item]).sort(([a], [b]) => b - a).map(([, item]) => item);
const count = (number, noun) => `${format(number)} ${noun}${number === 1 ? "" : "s"}`;

/** A new element; a child is a node or a text. */
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function makeSvg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function colored(element, color) {
  element.style.setProperty("--color", color);
  return element;
}

/** The coloured dot and the name of a run. */
const nameOf = (run) => make("span", {}, colored(make("i", { className: "chip" }), run.color), run.name);

function format(value) {
  if (value === null || value === undefined) return "–";
  if (!isNumber(value)) return typeof value === "string" ? value : JSON.stringify(value);
  const size = Math.abs(value);
  if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(4));
}

/** [[step, value], ...] of a metric, without the steps that lack it. */
function pointsOf(run, metric) {
  const values = run.metrics[metric] || [];
  return run.steps.map((step, i) => [step, values[i]]).filter(([, value]) => isNumber(value));
}

const metricsOf = (run) => Object.keys(run.metrics).filter((name) => run.metrics[name].some(isNumber));

/** A part that is made when it is first opened. */
function makeFolded(title, hint, build, isOpen = false) {
  const place = make("div");
  const ontoggle = () => place.childElementCount || place.append(build());
  if (isOpen) ontoggle();
  return make("details", { className: "fold", ontoggle, open: isOpen }, make("summary", {}, make("b", {}, title), make("span", {}, hint)), place);
}

// Curves

/** Each value becomes the mean of the values at most half the window away. */
function smooth(points, window) {
  const reach = (window - 1) / 2;
  let [first, end, total] = [0, 0, 0];
  return points.map(([step]) => {
    while (end < points.length && points[end][0] <= step + reach) total += points[end++][1];
    while (points[first][0] < step - reach) total -= points[first++][1];
    return [step, total / (end - first)];
  });
}

/** At most `most` round numbers from `low` to `high`. */
function ticks([low, high], most) {
  const size = 10 ** Math.floor(Math.log10((high - low) / most));
  const gap = size * [1, 2, 5, 10].find((factor) => (high - low) / (factor * size) <= most);
  const first = Math.ceil(low / gap);
  return Array.from({ length: Math.floor(high / gap) - first + 1 }, (_, i) => +((first + i) * gap).toPrecision(12));
}

function rangeOf(values) {
  const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return low < high ? [low, high] : [low - 0.5, low + 0.5];
}

/** The ends of a chart's axis. Unless it is fitted it has 0, so that noise does not look like a trend. */
function axisOf(metric, values) {
  if (byId("axes").value === "fitted") return rangeOf(values);
  const isShare = SHARES.test(metric) || (REWARDS.test(metric) && values.every((value) => value >= 0 && value <= 1));
  return rangeOf([...values, 0, ...(isShare ? [1] : [])]);
}

const isConstant = (points) => points.every(([, value]) => value === points[0][1]);

/** A chart; the caption has the values under the pointer. */
function makeChart(title, points, [low, high], describe, usual) {
  const steps = rangeOf(points.map(([step]) => step));
  const { width, height } = CHART;
  const [right, bottom] = [width - 8, height - 20];
  const x = (step) => 54 + ((right - 54) * (step - steps[0])) / (steps[1] - steps[0]);
  const y = (value) => 8 + ((bottom - 8) * (high - value)) / (high - low);
  const spoken = [title.textContent, ...steps.map((step) => `step ${step}: ${describe(step)}`)].join(", ");
  const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spoken });
  const write = (text, attributes) => svg.appendChild(makeSvg("text", attributes)).append(text);
  for (const value of ticks([low, high], 6)) {
    svg.append(makeSvg("path", { class: "grid", d: `M54 ${y(value)}H${right}` }));
    write(format(value), { x: 49, y: y(value) + 4, "text-anchor": "end" });
  }
  for (const step of ticks(steps, 6).filter(Number.isInteger)) {
    write(format(step), { x: x(step), y: height - 3, "text-anchor": "middle" });
  }
  const caption = make("span", {}, usual);
  const cursor = svg.appendChild(makeSvg("path", { class: "grid" }));
  const near = ({ clientX }) => {
    const box = svg.getBoundingClientRect();
    const distance = (step) => Math.abs(x(step) - ((clientX - box.left) / box.width) * width);
    return points.reduce((best, [step]) => (distance(step) < distance(best) ? step : best), Infinity);
  };
  svg.onpointermove = (event) => {
    cursor.setAttribute("d", `M${x(near(event))} 8V${bottom}`);
    caption.replaceChildren(`step ${near(event)}: ${describe(near(event))}`);
  };
  svg.onpointerleave = () => {
    cursor.setAttribute("d", "");
    caption.replaceChildren(usual);
  };
  const figure = make("figure", {}, make("figcaption", {}, title, caption), svg);
  const draw = (className, color, line) => {
    const d = line.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    svg.append(colored(makeSvg("path", { class: className, d }), color));
  };
  return { figure, draw };
}

/** The curves of a metric: of each run its points, and the ends of their error bars. */
function linesOf(metric) {
  const limit = (value) => (SHARES.test(metric) ? Math.min(1, Math.max(0, value)) : value);
  const lines = RUNS.map((run) => {
    const points = pointsOf(run, metric);
    const errors = new Map(pointsOf(run, `${metric}_stderr`));
    const bars = points.map(([step, value]) => [-1, 1].map((sign) => [step, limit(value + sign * CONFIDENCE * (errors.get(step) || 0))]));
    return { run, points, bars, errors };
  });
  return lines.filter(({ points }) => points.length);
}

const withError = (value, error) => format(value) + (error ? ` ± ${format(CONFIDENCE * error)}` : "");

/** A metric of all runs with its first and last value, as curves with error bars unless it is constant. */
function makeFigure(metric, ...heads) {
  const lines = linesOf(metric);
  const title = make("span", {}, ...heads);
  const endsOf = ({ points, errors }) => union([points[0], points.at(-1)].map(([step, value]) => withError(value, errors.get(step)))).join(" → ");
  const ends = lines.map(endsOf).join(" | ");
  if (lines.every(({ points }) => isConstant(points))) return make("figure", {}, make("figcaption", {}, title, make("span", {}, `${ends} at all steps`)));
  const window = +byId("smoothing").value;
  const describe = (step) => lines.map(({ points, errors }) => withError(points.find((point) => point[0] === step)?.[1], errors.get(step))).join(" | ");
  const places = lines.flatMap(({ bars }) => bars.flat());
  const axis = axisOf(metric, places.map(([, value]) => value));
  const cut = axis[0] > 0 || axis[1] < 0 ? ", axis without 0" : "";
  const { figure, draw } = makeChart(title, places, axis, describe, ends + cut);
  for (const { run, points, bars, errors } of lines) {
    if (errors.size) bars.forEach((bar) => draw("", run.color, bar));
    if (window > 1) draw("faint", run.color, points);
    draw("", run.color, smooth(points, window));
    if (points.length <= 25) points.forEach((point) => draw("dot", run.color, [point, point]));
  }
  return figure;
}

/** The metrics of a topic; those that never change come last. */
function drawTopic(title, names, isOpen) {
  const isVarying = (name) => linesOf(name).some(({ points }) => !isConstant(points));
  const ordered = sorted(names, isVarying);
  const draw = () => make("div", { className: "charts" }, ...ordered.map((name) => makeFigure(name, make("b", {}, name))));
  const fold = makeFolded(title, ordered.join(", "), draw, isOpen);
  fold.dataset.topic = title;
  return fold;
}

function drawCharts() {
  const open = [...byId("charts").querySelectorAll("details[open]")].map((fold) => fold.dataset.topic);
  const headlines = Object.entries(Object.assign({}, ...RUNS.map((run) => run.headlines)));
  byId("headlines").replaceChildren(...headlines.map(([metric, label]) => makeFigure(metric, make("b", {}, metric), ` ${label}`)));
  const drawn = headlines.map(([metric]) => metric);
  let names = union(RUNS.map(metricsOf)).filter((name) => !drawn.includes(name) && !/^step$|_stderr$/.test(name));
  byId("charts").replaceChildren();
  for (const [title, patterns] of SECTIONS) {
    const own = union(patterns.map((pattern) => names.filter((name) => pattern.test(name))));
    names = names.filter((name) => !own.includes(name));
    if (own.length) byId("charts").append(drawTopic(title, own, open.includes(title)));
  }
}

// Summary, steps and configuration

/** { "section.key": value } of nested sections. */
function flatten(section, prefix = "") {
  if (section === null || typeof section !== "object" || Array.isArray(section)) return { [prefix.slice(0, -1)]: section };
  return Object.assign({}, ...Object.entries(section).map(([name, part]) => flatten(part, `${prefix}${name}.`)));
}

/** The configuration, and what run.json says of the data and of the last start. */
function factsOf({ config, record }) {
  const { starts = [], ...others } = record || {};
  return { ...flatten(config || {}), ...flatten({ run: { ...others, ...starts.at(-1) } }) };
}

function makeTable(className, heads, rows) {
  const cells = (tag, values) => values.map((value) => make(tag, {}, value instanceof Node ? value : format(value)));
  const lines = [cells("th", heads), ...rows.map((row) => cells("td", row))];
  lines[0].forEach((cell) => (cell.scope = "col"));
  return make("div", { className, tabIndex: 0 }, make("table", {}, ...lines.map((line) => make("tr", {}, ...line))));
}

function drawSummary() {
  byId("title").textContent = document.title = RUNS.map((run) => run.name).join(", ");
  for (const run of RUNS) {
    const sample = run.steps.length < run.num_steps ? `, curves of ${format(run.steps.length)} of them` : "";
    const broken = run.num_broken ? `; ${count(run.num_broken, "line")} could not be read` : "";
    const text = `${run.folder} on ${DATA.written}, ${count(run.num_steps, "line")} of metrics${sample}${broken}`;
    byId("notes").append(make("li", {}, nameOf(run), ": ", text));
  }
}

/** What went wrong, with the reason at its first step. */
function drawWarnings() {
  for (const run of RUNS) {
    for (const { name, reason, steps } of run.warnings) {
      const item = make("li", {}, make("b", {}, `step ${format(steps[0])} ${name}`), `: ${reason}`);
      if (RUNS.length > 1) item.prepend(nameOf(run), " ");
      const total = run.num_steps - (run.metrics.step[0] === 0);
      const place = `${format(steps.length)} of ${count(total, "step")}, ${format(steps[0])} to ${format(steps.at(-1))}`;
      if (steps.length > 1) item.append(make("div", { className: "quiet" }, place));
      byId("warning-list").append(item);
    }
  }
  byId("warnings").hidden = !byId("warning-list").childElementCount;
}

function drawTables() {
  const facts = RUNS.map(factsOf);
  RUNS.forEach((run, i) => {
    const named = RUNS.length > 1 ? ` of ${run.name}` : "";
    const whole = () => makeTable("tall texts", ["key", "value"], Object.entries(facts[i]));
    byId("config").append(makeFolded(`Configuration${named}`, "keys, command, versions", whole));
  });
  if (RUNS.length === 1) return;
  const keys = union(facts.map(Object.keys)).filter((key) => !/^trainer\.(save_dir|experiment_name)$|^run\.(command|launch|time)$/.test(key));
  const differing = keys.filter((key) => new Set(facts.map((fact) => JSON.stringify(fact[key]))).size > 1);
  const rows = differing.map((key) => [key, ...facts.map((fact) => fact[key])]);
  const table = () => makeTable("wide texts", ["key", ...RUNS.map(nameOf)], rows);
  byId("config").prepend(makeFolded(`The runs differ in ${count(rows.length, "key")}`, differing.join(", "), table, true));
}

// Answers

let numCards = CARDS_A_PAGE;

const shownRun = () => RUNS[byId("run").value];
const shownSteps = () => shownRun().rollouts.filter(({ split }) => split === byId("split").value);

/** Fills a choice; an option is a value, or a value and its text. It is hidden unless there are two. */
function fillSelect(id, options, chosen = byId(id).value) {
  const makeOption = (value, text = value) => make("option", { value, selected: String(value) === String(chosen) }, text);
  byId(id).replaceChildren(...options.map((option) => makeOption(...[option].flat())));
  byId(id).parentElement.hidden = options.length < 2;
}

function chooseRun() {
  fillSelect("split", Object.keys(shownRun().num_rollouts), "train");
  chooseSplit();
}

function chooseSplit() {
  const steps = shownSteps();
  fillSelect("step", [...steps.map(({ step }) => step), ["all", "all of these"]], steps.at(-1)?.step);
  drawAnswers();
}

const textOf = ({ content }) => (typeof content === "string" ? content : JSON.stringify(content ?? "", null, 1));
const has = (text, query) => text.toLowerCase().includes(query.toLowerCase());
const numOf = (answers) => sum(answers.map((answer) => answer.count));

/** The groups of the steps, each with its title. */
function groupsOf(steps) {
  return steps.flatMap(({ step, groups }) => groups.map((group) => ({ ...group, title: `step ${step}, group ${format(group.group)}` })));
}

/** The groups with answers that have the searched text, in the chosen order. */
function selectGroups(groups) {
  const [order, query] = ["order", "text-search"].map((id) => byId(id).value);
  const isSelected = (answer, { prompt }) => !query || [...prompt, ...answer.messages].some((message) => has(textOf(message), query));
  const selected = groups.map((group) => ({ ...group, answers: group.answers.filter((answer) => isSelected(answer, group)) })).filter(({ answers }) => answers.length);
  if (order === "groups") return selected;
  const sign = order === "best" ? 1 : -1;
  return sorted(selected, ({ answers }) => Math.max(...answers.map(({ reward }) => sign * (reward || 0))));
}

function drawAnswers() {
  const chosen = byId("step").value;
  const steps = shownSteps().filter(({ step }) => ["all", String(step)].includes(chosen));
  const groups = selectGroups(groupsOf(steps));
  let room = numCards;
  const drawn = groups.filter(({ answers }) => (room -= answers.length) > -answers.length);
  byId("groups").replaceChildren(...drawn.map(makeGroup));
  byId("more").hidden = drawn.length === groups.length;
  const split = byId("split").value;
  const numHere = sum(steps.flatMap((step) => step.groups.map((group) => numOf(group.answers))));
  byId("answer-note").textContent = `${count(sum(groups.map(({ answers }) => numOf(answers))), "answer")} selected. `
    + `This page has ${format(numHere)} of ${count(sum(steps.map((step) => step.num_answers)), "answer")} here, `
    + `and ${format(shownSteps().length)} of ${count(shownRun().num_rollouts[split], "step")}; all are in rollouts/${split}/.`;
}

function makeGroup({ title, size, prompt, row, answers }) {
  const num = numOf(answers);
  const counted = num === size ? count(num, "answer") : `${format(num)} of ${count(size, "answer")}`;
  const heading = make("h3", {}, `${title}: ${counted}${answers.length < num ? `, ${answers.length} different` : ""}`);
  return make("article", { className: "group" }, heading, ...makePrompt(prompt, row || {}), make("div", { className: "cards" }, ...answers.map(makeCard)));
}

/** The last message of a prompt, the ones before it folded, and the row. */
function makePrompt(prompt, { answer, ...columns }) {
  const messages = prompt.slice(-1).map((message) => makeMessage(message, message.role !== "user"));
  const before = prompt.slice(0, -1);
  if (before.length) messages.unshift(makeFolded(`${count(before.length, "message")} before`, before.map(({ role }) => role).join(", "), () => make("div", {}, ...before.map((message) => makeMessage(message)))));
  if (answer !== undefined) messages.push(make("div", { className: "quiet" }, `row's answer: ${format(answer)}`));
  if (Object.keys(columns).length) messages.push(makeMessage({ role: "columns of the row", content: columns }));
  return messages;
}

/** An answer, with how many are equal to it, in the colour of its advantage. */
function makeCard(answer) {
  const side = ["bad", "", "good"][Math.sign(answer.advantage ?? 0) + 1];
  const header = make("header", {}, make("b", {}, format(answer.reward)));
  const tag = (text, className = "") => header.append(make("span", { className: `tag ${className}` }, text));
  if (answer.count > 1) tag(`× ${answer.count}`, "count");
  for (const [name, value] of Object.entries(answer.rewards || {})) {
    if (name !== "reward") tag(`${name} ${format(value)}`);
  }
  if (isNumber(answer.advantage)) tag(`advantage ${format(answer.advantage)}`, side);
  if (answer.finish_reason && answer.finish_reason !== "stop") tag(`ended by ${answer.finish_reason}`, "bad");
  if (isNumber(answer.length)) tag(count(answer.length, "token"));
  const isReply = answer.messages.length === 1 && answer.messages[0].role === "assistant";
  const messages = answer.messages.map((message) => makeMessage(message, !isReply));
  return colored(make("div", { className: "card" }, header, ...messages), side && `var(--${side})`);
}

/** A message. What is not of a person or the model is folded, and so are long turns. */
function makeMessage(message, hasRole = true) {
  const { role = "?", content, ...others } = message;
  const [text, query] = [textOf(message), byId("text-search").value];
  const body = make("pre", {}, ...(text === "" ? [make("small", {}, "(empty)")] : markedText(text, query)));
  if (Object.keys(others).length) body.append(`\n${JSON.stringify(others, null, 1)}`);
  if (["user", "assistant", "system"].includes(role) && text.length <= LONG_TEXT) {
    return make("div", { className: "message" }, ...(hasRole ? [make("small", {}, role)] : []), body);
  }
  const preview = text.length <= 160 ? text : `${text.slice(0, 80)} … ${text.slice(-80)}`;
  const summary = make("summary", {}, make("small", {}, `${role}, ${count(text.length, "character")}: `), preview);
  return make("details", { className: "message", open: query !== "" && has(text, query) }, summary, body);
}

function markedText(text, query) {
  const start = query ? text.toLowerCase().indexOf(query.toLowerCase()) : -1;
  if (start < 0) return [text];
  const end = start + query.length;
  return [text.slice(0, start), make("mark", {}, text.slice(start, end)), ...markedText(text.slice(end), query)];
}

function begin() {
  RUNS.forEach((run, i) => {
    run.color = COLORS[i % COLORS.length];
    run.steps = run.metrics.step || [];
    const name = run.folder.split(/[\\/]/).pop();
    run.name = RUNS.some((other) => other !== run && other.folder.endsWith(name)) ? run.folder : name;
    const same = run.metrics["rollout/zero_variance"];
    if (same) run.metrics["rollout/teaching"] = same.map((value) => (isNumber(value) ? 1 - value : null));
  });
  fillSelect("smoothing", [1, 5, 20]);
  fillSelect("axes", [["zero", "from 0"], ["fitted", "fitted to the curves"]]);
  drawSummary();
  drawWarnings();
  drawCharts();
  drawTables();
  byId("smoothing").onchange = byId("axes").onchange = drawCharts;
  byId("result").hidden = byId("to-result").hidden = !byId("headlines").childElementCount;
  byId("curve-controls").hidden = RUNS.every(({ steps }) => steps.length < 2);
  const played = RUNS.map((run, i) => [i, run.name]).filter(([i]) => RUNS[i].rollouts.length);
  byId("answers").hidden = byId("to-answers").hidden = !played.length;
  if (!played.length) return;
  for (const id of ["step", "order"]) byId(id).onchange = drawAnswers;
  byId("text-search").oninput = drawAnswers;
  byId("run").onchange = chooseRun;
  byId("split").onchange = chooseSplit;
  byId("more").onclick = () => {
    numCards += CARDS_A_PAGE;
    drawAnswers();
  };
  fillSelect("run", played);
  fillSelect("order", [["groups", "in their order"], ["best", "the best answers first"], ["worst", "the worst answers first"]]);
  chooseRun();
}

begin();
