"use strict";
// Texts of runs become text nodes, never HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
// For white and black.
const COLORS = ["#2f81e0", "#e0701a", "#1a9a6c", "#d0519a", "#8a6fe0"];
const SECTIONS = [
  ["Reward", [/^reward\/mean$/, /^reward\//]],
  ["Held-out rows", [/^test\/(?!(.+\/)?(rollout|tokens))/]],
  ["Answers", [/^rollout\/(length|truncated|teaching|failed|turns)$/]],
  ["Policy", [/^actor\/(loss|.*kl|entropy|grad_norm|visible_update|clip_ratio|accuracy|margin)$/, /^critic\//]],
  ["Engine and trainer", [/^actor\/(mismatch|effective)/]],
  ["Time and memory", [/^time\/step$/, /^(memory|resources)/, /^tokens\/per_second$/]],
  ["Others", [/./]],
];
const CONFIDENCE = 1.96; // standard errors: 95%
const LONG_TEXT = 1200; // characters; a longer turn is folded
const CARDS_A_PAGE = 48;

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
function makeFolded(title, isOpen, build) {
  const place = make("div");
  const ontoggle = () => place.childElementCount || place.append(build());
  if (isOpen) ontoggle();
  return make("details", { ontoggle, open: isOpen }, make("summary", {}, ...title), place);
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

/** A chart; the caption has the values under the pointer. */
function makeChart(title, points, describe, usual) {
  const [steps, values] = [0, 1].map((i) => rangeOf(points.map((point) => point[i])));
  const x = (step) => 54 + (298 * (step - steps[0])) / (steps[1] - steps[0]);
  const y = (value) => 8 + (138 * (values[1] - value)) / (values[1] - values[0]);
  const svg = makeSvg("svg", { viewBox: "0 0 360 166" });
  const write = (text, attributes) => svg.appendChild(makeSvg("text", attributes)).append(text);
  for (const value of ticks(values, 6)) {
    svg.append(makeSvg("path", { class: "grid", d: `M54 ${y(value)}H352` }));
    write(format(value), { x: 49, y: y(value) + 4, "text-anchor": "end" });
  }
  for (const step of ticks(steps, 6).filter(Number.isInteger)) {
    write(format(step), { x: x(step), y: 163, "text-anchor": "middle" });
  }
  const caption = make("span", {}, ...usual);
  const cursor = svg.appendChild(makeSvg("path", { class: "grid" }));
  const near = ({ clientX }) => {
    const box = svg.getBoundingClientRect();
    const distance = (step) => Math.abs(x(step) - ((clientX - box.left) / box.width) * 360);
    return points.reduce((best, [step]) => (distance(step) < distance(best) ? step : best), Infinity);
  };
  svg.onpointermove = (event) => {
    cursor.setAttribute("d", `M${x(near(event))} 8V146`);
    caption.replaceChildren(`step ${near(event)}: ${describe(near(event))}`);
  };
  svg.onpointerleave = () => {
    cursor.setAttribute("d", "");
    caption.replaceChildren(...usual);
  };
  const figure = make("figure", {}, make("figcaption", {}, make("b", {}, title), caption), svg);
  const draw = (className, color, line) => {
    const d = line.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    svg.append(colored(makeSvg("path", { class: className, d }), color));
  };
  return { figure, draw };
}

/** One metric of all runs, with error bars if it has a standard error. */
function lineChart(metric, window) {
  const lines = [];
  for (const run of RUNS) {
    for (const name of metric === "memory/peak_gib" ? [metric, "memory/predicted_gib"] : [metric]) {
      const points = pointsOf(run, name);
      const errors = new Map(pointsOf(run, `${name}_stderr`));
      const bars = points.map(([step, value]) => [-1, 1].map((sign) => [step, value + sign * CONFIDENCE * (errors.get(step) || 0)]));
      lines.push({ run, points, bars, errors, className: name === metric ? "" : "dashed" });
    }
  }
  const shown = lines.filter(({ points }) => points.length);
  const describe = (step) => shown.map(({ points, errors }) => {
    const error = errors.get(step);
    return format(points.find((point) => point[0] === step)?.[1]) + (error ? ` ± ${format(CONFIDENCE * error)}` : "");
  }).join(" | ");
  const last = shown.map(({ points }) => format(points.at(-1)[1])).join(" | ");
  const { figure, draw } = makeChart(shown.some(({ className }) => className) ? `${metric} (dashed: predicted)` : metric, shown.flatMap(({ bars }) => bars.flat()), describe, [`last ${last}`]);
  for (const { run, points, bars, errors, className } of shown) {
    if (errors.size) bars.forEach((bar) => draw("", run.color, bar));
    if (window > 1) draw("faint", run.color, points);
    draw(className, run.color, smooth(points, window));
    if (points.length <= 25) points.forEach((point) => draw("dot", run.color, [point, point]));
  }
  return figure;
}

/** The phases of a run's steps, one on top of the other. */
function phaseChart(run, window) {
  const phases = metricsOf(run).filter((name) => /^time\/(?!step$)/.test(name));
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
  const title = `seconds of each phase${RUNS.length > 1 ? `, ${run.name}` : ""}`;
  const { figure, draw } = makeChart(title, [...edges[0], ...edge], describe, legend);
  phases.forEach((_, k) => draw("area", colors[k], [...edges[k], ...edges[k + 1].slice().reverse()]));
  return figure;
}

function drawCharts() {
  const window = +byId("smoothing").value;
  const isDrawnElsewhere = (name) => /^step$|_stderr$|^memory\/predicted|^time\/(?!step$)/.test(name);
  let names = union(RUNS.map(metricsOf)).filter((name) => !isDrawnElsewhere(name));
  byId("charts").replaceChildren();
  for (const [title, patterns] of SECTIONS) {
    const own = union(patterns.map((pattern) => names.filter((name) => pattern.test(name))));
    names = names.filter((name) => !own.includes(name));
    const draw = () => {
      const phases = own.includes("time/step") ? RUNS.filter((run) => run.steps.length) : [];
      const charts = own.map((name) => lineChart(name, window));
      return make("div", { className: "charts" }, ...charts, ...phases.map((run) => phaseChart(run, window)));
    };
    if (own.length) byId("charts").append(makeFolded([title], title !== "Others", draw));
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
  return make("div", { className }, make("table", {}, ...lines.map((line) => make("tr", {}, ...line))));
}

function drawSummary() {
  const metrics = union(RUNS.map(metricsOf)).filter((name) => /^(test\/(.+\/)?)?(reward\/mean|loss)$/.test(name));
  const change = (metric) => (run) => {
    const points = pointsOf(run, metric);
    return points.length ? `${format(points[0][1])} → ${format(points.at(-1)[1])}` : null;
  };
  const columns = [
    ["model", (run) => (run.config?.actor || run.config?.critic)?.model_name],
    ["steps", (run) => run.steps.at(-1)],
    ...metrics.map((metric) => [metric, change(metric)]),
  ].filter(([, read]) => RUNS.some(read));
  const rows = RUNS.map((run) => [nameOf(run), ...columns.map(([, read]) => read(run))]);
  byId("summary").append(makeTable("wide", ["run", ...columns.map(([head]) => head)], rows));
  byId("title").textContent = document.title = RUNS.map((run) => run.name).join(", ");
  for (const { folder, steps, num_steps, num_broken } of RUNS) {
    const broken = num_broken ? `; ${count(num_broken, "line")} could not be read` : "";
    const text = num_steps ? `curves of ${format(steps.length)} of ${count(num_steps, "line")}` : "no step is finished yet";
    byId("notes").append(make("li", {}, `${folder} on ${DATA.written}: ${text}${broken}.`));
  }
}

function stepTable(run) {
  const patterns = SECTIONS.slice(0, -1).flatMap(([, section]) => section);
  const names = union([/^step$/, ...patterns].map((pattern) => metricsOf(run).filter((name) => pattern.test(name))));
  return makeTable("tall", names, run.steps.map((_, i) => names.map((name) => run.metrics[name][i])));
}

function drawTables() {
  const facts = RUNS.map(factsOf);
  RUNS.forEach((run, i) => {
    byId("step-tables").append(makeFolded([nameOf(run)], run.steps.length <= 100, () => stepTable(run)));
    const whole = () => makeTable("tall texts", ["key", "value"], Object.entries(facts[i]));
    byId("configs").append(makeFolded(["all of ", nameOf(run)], false, whole));
  });
  if (RUNS.length === 1) return;
  const keys = union(facts.map(Object.keys)).filter((key) => !/^trainer\.(save_dir|experiment_name)$|^run\.(command|launch|time)$/.test(key));
  const differing = keys.filter((key) => new Set(facts.map((fact) => JSON.stringify(fact[key]))).size > 1);
  const rows = differing.map((key) => [key, ...facts.map((fact) => fact[key])]);
  const title = make("h3", {}, `The runs differ in ${count(rows.length, "key")}`);
  byId("differences").append(title, makeTable("wide texts", ["key", ...RUNS.map(nameOf)], rows));
}

// Answers

let numCards = CARDS_A_PAGE;

const shownRun = () => RUNS[byId("run").value];
const shownSteps = () => shownRun().rollouts.steps.filter((step) => step.split === byId("split").value);

/** Sets the options, each a value or [value, text], and keeps what was chosen if it is still there. */
function fillSelect(id, options, chosen = byId(id).value) {
  const makeOption = (value, text = value) => make("option", { value, selected: String(value) === String(chosen) }, text);
  byId(id).replaceChildren(...options.map((option) => makeOption(...[option].flat())));
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
  const single = items.flatMap((item) => item.answers.map((answer) => ({ ...item, answers: [answer] })));
  return sorted(single, ({ answers: [{ reward }] }) => (order === "best" ? 1 : -1) * (reward ?? 0));
}

function drawAnswers() {
  const order = byId("order").value;
  const isFlat = order === "best" || order === "worst";
  const steps = shownSteps().filter(({ step }) => ["all", String(step)].includes(byId("step").value));
  const items = selectItems(steps, order);
  const shade = makeShade(items.flatMap(({ answers }) => answers));
  let room = numCards;
  const drawn = items.filter(({ answers }) => (room -= answers.length) > -answers.length);
  const cards = drawn.map(({ step, group, answers }) => answers.map((answer) => makeCard(answer, group, shade, isFlat && step)));
  byId("groups").replaceChildren(...(isFlat ? [make("div", { className: "cards" }, ...cards.flat())] : drawn.map((item, i) => makeGroup(item, cards[i]))));
  byId("more").hidden = drawn.length === items.length;
  byId("answer-note").textContent = describeSample(steps, sum(items.map(({ answers }) => answers.length)));
  byId("shade-note").textContent = shade.note;
}

/** What is selected, and what this page has of the steps. */
function describeSample(steps, numSelected) {
  const split = byId("split").value;
  const numHere = sum(steps.flatMap((step) => step.groups.map((group) => group.answers.length)));
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

function makeGroup({ step, group, answers }, cards) {
  const title = `step ${step.step}, group ${format(group.group)}: ${format(answers.length)} of ${count(group.size, "answer")}`;
  return make("div", {}, make("h3", {}, title), ...makePrompt(group), make("div", { className: "cards" }, ...cards));
}

function makePrompt({ prompt, row }) {
  const { answer, ...columns } = row || {};
  const messages = prompt.map((message) => makeMessage(message, {}));
  if (Object.keys(columns).length) messages.push(makeMessage({ role: "columns of the row", content: columns }, {}));
  return messages;
}

function makeCard(answer, group, shade, step) {
  const header = make("header", {}, make("b", {}, format(answer.reward)));
  const tag = (text, className = "") => header.append(make("span", { className: `tag ${className}` }, text));
  if (group.row?.answer !== undefined) header.append(make("span", {}, `row's answer: ${format(group.row.answer)}`));
  for (const [name, value] of Object.entries(answer.rewards || {})) {
    if (name !== "reward") tag(`${name} ${format(value)}`);
  }
  const side = ["bad", "", "good"][Math.sign(answer.advantage || 0) + 1];
  if (isNumber(answer.advantage)) tag(`advantage ${format(answer.advantage)}`, side);
  if (answer.finish_reason) tag(answer.finish_reason, answer.finish_reason === "stop" ? "" : "bad");
  if (isNumber(answer.length)) tag(count(answer.length, "token"));
  const messages = answer.messages.map((message) => makeMessage(message, shade));
  if (step) {
    tag(`step ${step.step}, group ${format(group.group)}`);
    messages.unshift(...makePrompt(group));
  }
  return colored(make("article", { className: "card" }, header, ...messages), side && `var(--${side})`);
}

/** A message. What is not of a person or the model is folded, and so are long turns. */
function makeMessage(message, shade) {
  const { role = "?", content, tokens, ...others } = message;
  const [text, query] = [textOf(message), byId("text-search").value];
  const isShaded = shade.kind && tokens?.[shade.kind];
  const body = make("pre", {}, ...(isShaded ? shadedTokens(tokens, shade) : markedText(text, query)));
  if (Object.keys(others).length) body.append(`\n${JSON.stringify(others, null, 1)}`);
  if (["user", "assistant", "system"].includes(role) && text.length <= LONG_TEXT) {
    return make("div", { className: "message" }, make("small", {}, role), body);
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
  drawSummary();
  drawCharts();
  drawTables();
  byId("smoothing").onchange = drawCharts;
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
