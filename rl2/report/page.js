"use strict";
// Texts of runs become text nodes, never HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
// For white and black.
const COLORS = ["#2f81e0", "#e0701a", "#1a9a6c", "#d0519a", "#8a6fe0", "#a98307", "#238ca2", "#b34a3c"];
const SECTIONS = [
  ["Reward", [/^reward\/mean$/, /^reward\//]],
  ["Held-out rows", [/^test\/(?!(.+\/)?(rollout|tokens))/]],
  ["Rollouts", [/^rollout\/(length|truncated|teaching|failed|turns)$/]],
  ["Policy", [/^actor\/(loss|.*kl|entropy|grad_norm|visible_update|clip_ratio|accuracy|margin)$/, /^critic\//]],
  ["Engine and trainer", [/^actor\/(mismatch|effective)/]],
  ["Sources", [/^sources\//]],
  ["Time and memory", [/^time\/step$/, /^(time|memory|resources)\//, /^tokens\/per_second$/]],
  ["Others", [/./]],
];
// Their charts reach from 0 to 1. A reward is one if all its values are between these.
const SHARES = /(^|[/])(truncated|failed|teaching|zero_variance|filtered|accuracy|(avg|pass|maj)@\d+)$/;
const REWARDS = /(^|[/])reward[/](?!std$)/;
const CONFIDENCE = 1.96; // standard errors: 95%
const LONG_TEXT = 1200; // characters; a longer turn is folded
const CARDS_A_PAGE = 48;
const QUESTIONS_A_PAGE = 6;
const SMALL_CHART = { width: 360, height: 166 };

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

/** With three digits, for large type. */
const formatShort = (value) => (Number.isInteger(value) ? format(value) : format(+value.toPrecision(3)));

/** [[step, value], ...] of a metric, without the steps that lack it. */
function pointsOf(run, metric) {
  const values = run.metrics[metric] || [];
  return run.steps.map((step, i) => [step, values[i]]).filter(([, value]) => isNumber(value));
}

const metricsOf = (run) => Object.keys(run.metrics).filter((name) => run.metrics[name].some(isNumber));

/** A part that is made when it is first opened. */
function makeFolded(title, isOpen, build) {
  const place = make("div");
  const ontoggle = () => place.childElementCount || place.append(build());
  if (isOpen) ontoggle();
  return make("details", { className: "fold", ontoggle, open: isOpen }, make("summary", {}, ...title), place);
}

const makeTitle = (title, hint) => [make("b", {}, title), make("span", {}, hint)];

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
function makeChart(heads, points, [low, high], describe, usual, { width, height }) {
  const steps = rangeOf(points.map(([step]) => step));
  const [right, bottom] = [width - 8, height - 20];
  const x = (step) => 54 + ((right - 54) * (step - steps[0])) / (steps[1] - steps[0]);
  const y = (value) => 8 + ((bottom - 8) * (high - value)) / (high - low);
  const spoken = [...heads.map((head) => head.textContent), ...steps.map((step) => `step ${step}: ${describe(step)}`)].join(", ");
  const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spoken });
  const write = (text, attributes) => svg.appendChild(makeSvg("text", attributes)).append(text);
  for (const value of ticks([low, high], 6)) {
    svg.append(makeSvg("path", { class: "grid", d: `M54 ${y(value)}H${right}` }));
    write(format(value), { x: 49, y: y(value) + 4, "text-anchor": "end" });
  }
  for (const step of ticks(steps, 6).filter(Number.isInteger)) {
    write(format(step), { x: x(step), y: height - 3, "text-anchor": "middle" });
  }
  const caption = make("span", {}, ...usual);
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
    caption.replaceChildren(...usual);
  };
  const figure = make("figure", {}, make("figcaption", {}, heads[0], caption), ...heads.slice(1), svg);
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

/** One metric of all runs, with error bars if it has a standard error. `usual` is the caption. */
function lineChart(metric, heads, usual, size) {
  const lines = linesOf(metric);
  const window = +byId("smoothing").value;
  const describe = (step) => lines.map(({ points, errors }) => withError(points.find((point) => point[0] === step)?.[1], errors.get(step))).join(" | ");
  const ends = lines.flatMap(({ bars }) => bars.flat());
  const axis = axisOf(metric, ends.map(([, value]) => value));
  const cut = axis[0] > 0 || axis[1] < 0 ? ", axis without 0" : "";
  const { figure, draw } = makeChart(heads, ends, axis, describe, [usual + cut], size);
  for (const { run, points, bars, errors } of lines) {
    if (errors.size) bars.forEach((bar) => draw("", run.color, bar));
    if (window > 1) draw("faint", run.color, points);
    draw("", run.color, smooth(points, window));
    if (points.length <= 25) points.forEach((point) => draw("dot", run.color, [point, point]));
  }
  return figure;
}

function smallChart(metric) {
  const lines = linesOf(metric);
  const last = lines.map(({ points }) => format(points.at(-1)[1])).join(" | ");
  return lineChart(metric, [make("b", {}, metric)], `last ${last}`, SMALL_CHART);
}

/** The first and the last value of a run, with their errors. */
function makeNumbers({ run, points, errors }) {
  const isAlone = RUNS.length === 1;
  const line = make("div", { className: isAlone ? "numbers" : "numbers several" });
  const add = ([step, value]) => {
    const error = CONFIDENCE * (errors.get(step) || 0);
    line.append(formatShort(value), make("small", {}, error ? ` ± ${format(+error.toPrecision(2))}` : ""));
  };
  if (!isAlone) line.append(nameOf({ name: "", color: run.color }));
  add(points[0]);
  if (points.length > 1) {
    line.append(" → ");
    add(points.at(-1));
  }
  const place = points.length > 1 ? ` at all ${points.length} steps` : ` at step ${points[0][0]}`;
  line.append(make("small", {}, isConstant(points) ? place : "", isAlone ? "" : ` ${run.name}`));
  return line;
}

/** A result: its name, the first and the last value of each run, and a chart unless it is constant. */
function makeHeadline(metric, label, size) {
  const lines = linesOf(metric);
  const name = make("span", {}, make("b", {}, `${label[0].toUpperCase()}${label.slice(1)}`), ` ${metric}`);
  const numbers = lines.map(makeNumbers);
  if (lines.every(({ points }) => isConstant(points))) return make("figure", {}, make("figcaption", {}, name), ...numbers);
  const steps = lines.map(({ points }) => `${format(points[0][0])} → ${format(points.at(-1)[0])}`);
  return lineChart(metric, [name, ...numbers], `step ${union(steps).join(" | ")}`, size);
}

/** The size of a result's chart, so that its texts have their size on this screen. */
function sizeOfHeadlines(number) {
  const room = byId("headlines").clientWidth;
  const columns = Math.max(1, Math.min(number, Math.floor(room / 360)));
  return { width: Math.min(room / columns, 640) - 36, height: 200 };
}

/** The phases of a run's steps, one on top of the other. */
function phaseChart(run) {
  const window = +byId("smoothing").value;
  const phases = metricsOf(run).filter(isPhase);
  let edge = run.steps.map((step) => [step, 0]);
  const edges = [edge];
  for (const phase of phases) {
    const seconds = smooth(run.steps.map((step, i) => [step, run.metrics[phase][i] || 0]), window);
    edge = edge.map(([step, value], i) => [step, value + seconds[i][1]]);
    edges.push(edge);
  }
  const colors = phases.map((_, k) => COLORS[k % COLORS.length]);
  const legend = phases.map((phase, k) => nameOf({ name: `${phase.slice(5)} `, color: colors[k] }));
  const describe = (step) => phases.map((phase) => `${phase.slice(5)} ${format(run.metrics[phase][run.steps.indexOf(step)])}`).join(", ");
  const title = make("b", {}, `seconds of each phase${RUNS.length > 1 ? `, ${run.name}` : ""}`);
  const points = [...edges[0], ...edge];
  const { figure, draw } = makeChart([title], points, rangeOf(points.map(([, value]) => value)), describe, legend, SMALL_CHART);
  phases.forEach((_, k) => draw("area", colors[k], [...edges[k], ...edges[k + 1].slice().reverse()]));
  return figure;
}

const isPhase = (name) => /^time\/(?!step$)/.test(name);

/** The metrics that never change, each with its value in each run. */
function makeConstants(names) {
  const valueOf = (name) => linesOf(name).map(({ points }) => format(points[0][1])).join(" | ");
  return make("dl", { className: "constants" }, ...names.map((name) => make("div", {}, make("dt", {}, name), make("dd", {}, valueOf(name)))));
}

/** The metrics of a topic, without those that are drawn elsewhere; the phases are in one chart. */
function drawTopic(title, names, isOpen) {
  const constants = names.filter((name) => linesOf(name).every(({ points }) => isConstant(points)));
  const varying = names.filter((name) => !constants.includes(name));
  const phased = names.includes("time/step") ? RUNS.filter(({ steps }) => steps.length > 1) : [];
  const draw = () => {
    const charts = [...varying.map(smallChart), ...phased.map(phaseChart)];
    const list = constants.length ? [make("p", { className: "quiet" }, "The same at all steps:"), makeConstants(constants)] : [];
    return make("div", {}, make("div", { className: "charts" }, ...charts), ...list);
  };
  const fold = makeFolded(makeTitle(title, [...varying, ...constants].join(", ")), isOpen, draw);
  fold.dataset.topic = title;
  return fold;
}

function drawCharts() {
  const open = [...byId("charts").querySelectorAll("details[open]")].map((fold) => fold.dataset.topic);
  const headlines = Object.entries(Object.assign({}, ...RUNS.map((run) => run.summary.headlines)));
  const size = sizeOfHeadlines(headlines.length);
  byId("headlines").replaceChildren(...headlines.map(([metric, label]) => makeHeadline(metric, label, size)));
  const drawn = headlines.map(([metric]) => metric);
  const hasPhaseChart = RUNS.some((run) => run.steps.length > 1);
  const isDrawnElsewhere = (name) => /^step$|_stderr$/.test(name) || (hasPhaseChart && isPhase(name));
  let names = union(RUNS.map(metricsOf)).filter((name) => !drawn.includes(name) && !isDrawnElsewhere(name));
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
  for (const run of RUNS) {
    const [training, ...results] = run.summary.sentences;
    byId("summary").append(make("p", { className: "lead" }, ...(RUNS.length > 1 ? [nameOf(run), ": "] : []), training));
    if (RUNS.length === 1) byId("summary").append(make("p", {}, results.join(" ")));
  }
  byId("title").textContent = document.title = RUNS.map((run) => run.name).join(", ");
  for (const { folder, steps, num_steps, num_broken } of RUNS) {
    const sample = steps.length < num_steps ? `, curves of ${format(steps.length)} of ${count(num_steps, "line")}` : "";
    const broken = num_broken ? `; ${count(num_broken, "line")} could not be read` : "";
    byId("notes").append(make("li", {}, `${folder} on ${DATA.written}${sample}${broken}`));
  }
}

/** What went wrong, with the reason at its first step. */
function drawWarnings() {
  for (const run of RUNS) {
    for (const { name, reason, num_steps, steps } of run.warnings) {
      const item = make("li", {}, make("b", {}, `step ${format(steps[0])} ${name}`), `: ${reason}`);
      if (RUNS.length > 1) item.prepend(nameOf(run), " ");
      if (num_steps > 1) item.append(make("div", { className: "quiet" }, describeSteps(run, num_steps, steps)));
      byId("warning-list").append(item);
    }
  }
  byId("warnings").hidden = !byId("warning-list").childElementCount;
}

/** The steps of a warning; `steps` is a sample of them with the last one. */
function describeSteps(run, number, steps) {
  const total = run.num_steps - (run.metrics.step[0] === 0);
  const listed = steps.map(format).join(", ");
  return `${format(number)} of ${count(total, "step")}: ${number > steps.length ? `${format(steps[0])} to ${format(steps.at(-1))}` : listed}`;
}

function stepTable(run) {
  const patterns = SECTIONS.slice(0, -1).flatMap(([, section]) => section);
  const names = union([/^step$/, ...patterns].map((pattern) => metricsOf(run).filter((name) => pattern.test(name))));
  return makeTable("tall", names, run.steps.map((_, i) => names.map((name) => run.metrics[name][i])));
}

function drawTables() {
  const facts = RUNS.map(factsOf);
  RUNS.forEach((run, i) => {
    const named = RUNS.length > 1 ? ` of ${run.name}` : "";
    if (run.steps.length) byId("steps").append(makeFolded(makeTitle(`All steps${named}`, "as a table"), false, () => stepTable(run)));
    const whole = () => makeTable("tall texts", ["key", "value"], Object.entries(facts[i]));
    byId("config").append(makeFolded(makeTitle(`Configuration${named}`, "keys, command, versions"), false, whole));
  });
  if (RUNS.length === 1) return;
  const keys = union(facts.map(Object.keys)).filter((key) => !/^trainer\.(save_dir|experiment_name)$|^run\.(command|launch|time)$/.test(key));
  const differing = keys.filter((key) => new Set(facts.map((fact) => JSON.stringify(fact[key]))).size > 1);
  const rows = differing.map((key) => [key, ...facts.map((fact) => fact[key])]);
  const table = () => makeTable("wide texts", ["key", ...RUNS.map(nameOf)], rows);
  byId("config").prepend(makeFolded(makeTitle(`The runs differ in ${count(rows.length, "key")}`, differing.join(", ")), true, table));
}

// Answers

let numCards = CARDS_A_PAGE;
let numQuestions = QUESTIONS_A_PAGE;

const shownRun = () => RUNS[byId("run").value];
const shownSteps = () => shownRun().rollouts.steps.filter((step) => step.split === byId("split").value);

/** Sets the options, each a value or [value, text], and keeps what was chosen if it is still there. */
function fillSelect(id, options, chosen = byId(id).value) {
  const makeOption = (value, text = value) => make("option", { value, selected: String(value) === String(chosen) }, text);
  byId(id).replaceChildren(...options.map((option) => makeOption(...[option].flat())));
  byId(id).parentElement.hidden = options.length < 2;
}

function chooseRun() {
  fillSelect("split", Object.keys(shownRun().rollouts.num_steps), "train");
  chooseSplit();
}

function chooseSplit(step = shownSteps().at(-1)?.step) {
  fillSelect("step", [...shownSteps().map((shown) => shown.step), ["all", "all of these"]], step);
  const answers = shownSteps().flatMap((shown) => shown.groups.flatMap((group) => group.answers));
  const parts = union(answers.map((answer) => Object.keys(answer.rewards || {})));
  fillSelect("part", union(["reward", parts]));
  const reasons = union(answers.map((answer) => answer.finish_reason || "?"));
  fillSelect("finish", [["", "anything"], ...reasons]);
  const turns = answers.flatMap((answer) => answer.messages.map((message) => message.tokens || {}));
  const shades = [["advantages", "advantage"], ["gap", "|engine − trainer|"]];
  fillSelect("shade", [["", "nothing"], ...shades.filter(([kind]) => turns.some((turn) => turn[kind]))]);
  drawAnswers();
}

const textOf = ({ content }) => (typeof content === "string" ? content : JSON.stringify(content ?? "", null, 1));

const has = (text, query) => text.toLowerCase().includes(query.toLowerCase());

/** Whether the controls select an answer. */
function isSelected(answer, group) {
  const [finish, part, query, least, most] = ["finish", "part", "text-search", "least", "most"].map((id) => byId(id).value);
  const value = answer.rewards?.[part] ?? (part === "reward" ? answer.reward : undefined);
  return (!finish || (answer.finish_reason || "?") === finish) && !(least && !(value >= +least)) && !(most && !(value <= +most))
    && (!query || [...group.prompt, ...answer.messages].some((message) => has(textOf(message), query)));
}

/** The share of the words of two answers that only one of them has. */
function distance(...answers) {
  const [a, b] = answers.map(({ messages }) => new Set(messages.flatMap((message) => textOf(message).split(/\s+/))));
  const shared = [...a].filter((word) => b.has(word)).length;
  return 1 - shared / (a.size + b.size - shared);
}

/** [{ step, group, answers }] in the order of the controls. */
function selectItems(steps, order) {
  const all = steps.flatMap((step) => step.groups.map((group) => ({ step, group, answers: group.answers.filter((answer) => isSelected(answer, group)) })));
  const items = all.filter(({ answers }) => answers.length);
  if (order === "groups") return items;
  if (order === "different") {  // the best answer of each group, and the one that is least like it
    const pairs = items.filter(({ answers }) => answers.length > 1).map((item) => {
      const [best, ...others] = item.answers;
      return { ...item, answers: [best, sorted(others, (other) => distance(best, other))[0]] };
    });
    return sorted(pairs, ({ answers }) => distance(...answers));
  }
  const sign = order === "best" ? 1 : -1;
  const value = ({ reward }) => sign * (reward ?? 0);
  const first = items.map((item) => {  // of each group its best or worst answers
    const most = Math.max(...item.answers.map(value));
    return { ...item, answers: item.answers.filter((answer) => value(answer) === most) };
  });
  return sorted(first, ({ answers }) => value(answers[0]));
}

const numOf = (answers) => sum(answers.map((answer) => answer.count));

function drawAnswers() {
  const steps = shownSteps().filter(({ step }) => ["all", String(step)].includes(byId("step").value));
  const items = selectItems(steps, byId("order").value);
  const shade = makeShade(items.flatMap(({ answers }) => answers));
  let room = numCards;
  const drawn = items.filter(({ answers }) => (room -= answers.length) > -answers.length);
  byId("shared").replaceChildren(...makeShared(shownRun().rollouts.shared[byId("split").value]));
  byId("groups").replaceChildren(...drawn.map((item) => makeGroup(item, shade)));
  byId("more").hidden = drawn.length === items.length;
  byId("answer-note").textContent = describeSample(steps, sum(items.map(({ answers }) => numOf(answers))));
  byId("shade-note").textContent = shade.note;
}

/** What is selected, and what this page has of the steps. */
function describeSample(steps, numSelected) {
  const split = byId("split").value;
  const numHere = sum(steps.flatMap((step) => step.groups.map((group) => numOf(group.answers))));
  const numAnswers = sum(steps.map((step) => step.num_answers));
  return `${count(numSelected, "answer")} selected. This page has ${format(numHere)} of ${count(numAnswers, "answer")} here, `
    + `and ${format(shownSteps().length)} of ${count(shownRun().rollouts.num_steps[split], "step")}; all are in rollouts/${split}/.`;
}

/** How tokens are shaded: the kind of value, the largest of the answers, and what to say of it. */
function makeShade(answers) {
  const kind = byId("shade").value;
  const { tokens_note } = shownRun().rollouts;
  if (!kind) return { note: tokens_note };
  const values = answers.flatMap(({ messages }) => messages.flatMap(({ tokens }) => tokens?.[kind] || []));
  const most = values.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
  const meaning = kind === "gap" ? "The distance of the engine's and the trainer's log-probability" : "Green: an advantage above 0, red: below 0";
  return { kind, most, note: `${meaning}; the strongest shade is ${format(most)}.` };
}

function makeGroup({ step, group, answers }, shade) {
  const num = numOf(answers);
  const counted = num === group.size ? count(num, "answer") : `${format(num)} of ${count(group.size, "answer")}`;
  const merged = answers.length === 1 ? ", all equal" : `, ${answers.length} different`;
  const title = `step ${step.step}, group ${format(group.group)}: ${counted}${answers.length < num ? merged : ""}`;
  const cards = answers.map((answer) => makeCard(answer, shade));
  return make("article", { className: "group" }, make("h3", {}, title), ...makePrompt(group), make("div", { className: "cards" }, ...cards));
}

/** The messages with which all prompts begin, folded. */
function makeShared(messages = []) {
  if (!messages.length) return [];
  const roles = messages.map(({ role }) => role || "?").join(", ");
  const title = [`Prompts begin with ${messages.length > 1 ? `these ${messages.length} messages` : "this message"}, left out below`];
  return [makeFolded(makeTitle(title, roles), false, () => make("div", {}, ...messages.map((message) => makeMessage(message, {}))))];
}

function makePrompt({ prompt, row }) {
  const { answer, ...columns } = row || {};
  const messages = prompt.map((message) => makeMessage(message, {}, prompt.length > 1 || message.role !== "user"));
  if (answer !== undefined) messages.push(make("div", { className: "quiet" }, `row's answer: ${format(answer)}`));
  if (Object.keys(columns).length) messages.push(makeMessage({ role: "columns of the row", content: columns }, {}));
  return messages;
}

/** An answer, with how many are equal to it. The colour of its side is that of its advantage unless given. */
function makeCard(answer, shade, side = ["bad", "", "good"][Math.sign(answer.advantage || 0) + 1]) {
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
  const messages = answer.messages.map((message) => makeMessage(message, shade, !isReply));
  return colored(make("div", { className: "card" }, header, ...messages), side && `var(--${side})`);
}

// Held-out answers before and after

const comparedRun = () => RUNS[byId("compared-run").value];
const comparison = () => comparedRun().rollouts.comparisons.find(({ split }) => split === byId("compared-split").value);

function chooseCompared() {
  fillSelect("compared-split", comparedRun().rollouts.comparisons.map(({ split }) => split));
  drawCompared();
}

function drawCompared() {
  const { split, before, after, score, means, counts, shared, questions } = comparison();
  const total = sum(Object.values(counts));
  fillSelect("change", [["", `all ${format(total)}`], ...Object.entries(counts).filter(([, number]) => number).map(([change, number]) => [change, `${format(number)} ${change}`])]);
  const change = byId("change").value;
  const changed = (question) => question.change !== "same";
  const selected = sorted(questions.filter((question) => !change || question.change === change), changed);
  const shown = selected.slice(0, numQuestions);
  byId("compared-note").textContent = `By ${score ? `rollout.score=${score}` : "reward"}, step ${format(after)} answered ${format(counts.better)} of ${count(total, "question")} better than step ${format(before)}, `
    + `${format(counts.worse)} worse and ${format(counts.same)} the same (means ${format(means[1])} and ${format(means[0])}). This page has ${format(questions.length)} of them, the changed ones first; all are in rollouts/${split}/.`;
  byId("compared-shared").replaceChildren(...makeShared(shared));
  byId("questions").replaceChildren(...shown.map((question) => makeQuestion(question, before, after)));
  byId("more-questions").hidden = shown.length === selected.length;
}

/** A question with its answers of both evaluations side by side. */
function makeQuestion(question, before, after) {
  const color = { better: "good", worse: "bad", same: "" }[question.change];
  const side = (step, answers, sideColor) => make("div", {}, make("h4", {}, step ? `after step ${format(step)}` : "before training"),
    make("div", { className: "cards" }, ...answers.map((answer) => makeCard(answer, {}, sideColor))));
  const sides = make("div", { className: "sides" }, side(before, question.before, ""), side(after, question.after, color));
  return make("article", { className: "group" }, ...makePrompt(question), sides);
}

// Messages

/** A message. What is not of a person or the model is folded, and so are long turns. */
function makeMessage(message, shade, hasRole = true) {
  const { role = "?", content, tokens, ...others } = message;
  const [text, query] = [textOf(message), byId("text-search").value];
  const isShaded = shade.kind && tokens?.[shade.kind];
  const body = make("pre", {}, ...(text === "" ? [make("small", {}, "(empty)")] : isShaded ? shadedTokens(tokens, shade) : markedText(text, query)));
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

/** Neighbours of the same value are one span. */
function shadedTokens(tokens, { kind, most }) {
  const [text, values] = [tokens.text, tokens[kind]];
  const spans = [];
  for (let start = 0, end = 0; start < text.length; start = end) {
    while (end < text.length && values[end] === values[start]) end++;
    const color = kind === "gap" ? "230, 140, 0" : values[start] > 0 ? "30, 160, 80" : "225, 60, 50";
    const span = make("span", { title: format(values[start]) }, text.slice(start, end).join(""));
    span.style.background = `rgba(${color}, ${most ? (0.65 * Math.abs(values[start])) / most : 0})`;
    spans.push(span);
  }
  return spans;
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
  beginCompared();
  beginAnswers();
}

function beginCompared() {
  const compared = RUNS.map((run, i) => [i, run.name]).filter(([i]) => RUNS[i].rollouts.comparisons.length);
  byId("held-out").hidden = byId("to-held-out").hidden = !compared.length;
  if (!compared.length) return;
  const anew = (draw) => () => {
    numQuestions = QUESTIONS_A_PAGE;
    draw();
  };
  byId("compared-run").onchange = anew(chooseCompared);
  for (const id of ["compared-split", "change"]) byId(id).onchange = anew(drawCompared);
  byId("more-questions").onclick = () => {
    numQuestions += 4 * QUESTIONS_A_PAGE;
    drawCompared();
  };
  fillSelect("compared-run", compared);
  chooseCompared();
}

function beginAnswers() {
  const played = RUNS.map((run, i) => [i, run.name]).filter(([i]) => RUNS[i].rollouts.steps.length);
  byId("answers").hidden = byId("to-answers").hidden = !played.length;
  if (!played.length) return;
  const anew = (draw) => () => {
    numCards = CARDS_A_PAGE;
    draw();
  };
  for (const id of ["step", "order", "part", "finish", "shade"]) byId(id).onchange = anew(drawAnswers);
  for (const id of ["text-search", "least", "most"]) byId(id).oninput = anew(drawAnswers);
  byId("run").onchange = anew(chooseRun);
  byId("split").onchange = anew(() => chooseSplit());
  byId("more").onclick = () => {
    numCards += CARDS_A_PAGE;
    drawAnswers();
  };
  fillSelect("run", played);
  const orders = { groups: "groups side by side", best: "the best answers", worst: "the worst answers", different: "the most different answers" };
  fillSelect("order", Object.entries(orders));
  chooseRun();
}

begin();
