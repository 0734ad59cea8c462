// The tables of a graph, its ops in fp32 with their reasons, and the legend.

function table(caption, headers, rows) {
  const numeric = (cell) => typeof cell === "number" || /^[+\u2212]?[\d.,]+(\u00a0|$)/.test(cell);
  const cell = (value, i) => h(i ? "td" : "th", { class: numeric(value) && i ? "number" : "", ...(i ? {} : { scope: "row" }) },
    typeof value === "number" ? grouped(value) : value);
  return h("table", {}, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, headers.map((text, i) => h("th", { scope: "col", class: i ? "number" : "" }, text)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))));
}

/** The figures of the side that is shown: in fp32, or as placed with the gain. */
function showOverview() {
  const panel = document.getElementById("overview");
  const { tables, compute_dtype: low } = state.graph.raw;
  const { answers } = report;
  const isBefore = state.side === "before";
  panel.replaceChildren(
    ...(isBefore ? [] : verdict()),
    h("div", { class: "summary" }, answers.figures[state.side].map(({ value, title, note }) => figure(value, title, note))),
    ...gains(answers.gains),
    part("What runs low", isBefore ? h("p", {}, "Nothing: this is the graph before the pass.") : answers.runs_low.map((text) => h("p", {}, text)),
      report.explained_for ? h("p", { class: "note" }, "Explained for " + report.explained_for + ".") : ""),
    ...(isBefore ? [] : nextSteps()));
  if (tables.ops.length) {
    const all = (row) => row.low + row.fp32;
    panel.append(table("Ops of this graph by category", isBefore ? ["category", "fp32"] : ["category", low, "fp32"],
      tables.ops.map((row) => [h("span", { title: row.meaning }, row.category), ...(isBefore ? [all(row)] : [row.low, row.fp32])])));
  }
  if (!isBefore && tables.casts.length) {
    panel.append(table("Casts of this graph", ["kind", "count", "bytes"], tables.casts.map((row) => [castTitle(row), row.count, inBytes(row.bytes)])));
  }
  if (tables.ops.length) panel.append(...placements(tables));
  if (report.skipped.length) panel.append(part("Not converted", skipped()));
}

/** What a reader must know first, where nothing is converted. */
function verdict() {
  const [first, ...reasons] = report.answers.verdict;
  return first ? [h("section", { class: "verdict" }, h("h2", {}, first), ...reasons.map((text) => h("p", {}, text)))] : [];
}

function nextSteps() {
  const { next } = report.answers;
  return next.length ? [part("What to do next", ...next.map((text) => h("p", {}, text, " ", copyButton(text))))] : [];
}

/** The table of predicted gains, as print(report) shows it. */
function gains(found) {
  if (!found) return [];
  const { title, columns, rows, sentence, footnote, error } = found;
  return [rows.length ? table(title, ["", ...columns], rows.map(([name, ...texts]) => [name, ...texts.map((text) => text.replace(" ", "\u00a0"))])) : part(title), h("p", {}, sentence),
    ...[footnote, error].filter(Boolean).map((text) => h("p", { class: "note" }, text))];
}

const figure = (number, title, sub) =>
  h("div", { class: "figure" }, h("strong", {}, number), h("span", {}, title), h("small", {}, sub));

function castTitle({ kind, dtype, every_call: everyCall }) {
  if (kind === "weight") return everyCall ? "weights to " + dtype : "weights, kept in " + dtype;
  return kind + ", to " + dtype;
}

function placements({ placements: rows, device, cost, optimal_cost: best, for_bytes: forBytes, has_reward: rewarded }) {
  const headers = ["placement", "predicted", "against this"];
  const trains = rows.some(({ kept }) => kept);
  if (trains) headers.push("kept for the backward");
  if (rewarded) headers.push("allow ops in fp32");
  const cells = rows.map((row, i) => [row.title, amount(row.estimate), i ? amount(row.extra, true) : "",
    ...(trains ? [inBytes(row.kept)] : []), ...(rewarded ? [row.allow_in_fp32] : [])]);
  const least = cost === best ? "the least of all legal placements"
    : grouped(cost - best) + " above the least of all legal placements" + (forBytes ? ", so that less is kept for the backward" : "");
  return [table("Predicted time of this graph", headers, cells),
    h("p", { class: "note" }, `Prices of ${device}. The cost of this placement, ${grouped(cost)} units of 0.1 ns` +
      `${rewarded ? " with rewards for converted allow ops" : ""}, is ${least}; a recount over the rewritten graph agrees.`)];
}

function skipped() {
  return h("dl", {}, report.skipped.flatMap(({ what, why }) => [h("dt", {}, what), h("dd", {}, why)]));
}

/** Equal islands (of repeated layers) are one entry with a button for each place. */
function showReasons() {
  const panel = document.getElementById("reasons");
  const { islands, tables } = state.graph.raw;
  const between = islands.filter((island) => island.is_between);
  panel.replaceChildren();
  if (!tables.stayed.length) {
    panel.append(h("p", { class: "hint" }, "No float op of this graph stays in fp32."));
    return;
  }
  const groups = new Map();
  for (const island of between) {
    const key = island.nodes.map((n) => state.graph.nodes[n].title).join() + island.reasons.join();
    groups.set(key, [...(groups.get(key) ?? []), island]);
  }
  panel.append(part("Islands: fp32 between ops in low precision",
    between.length ? "" : h("p", { class: "hint" }, "There are no islands: the ops in fp32 stand before or behind all ops in low precision."),
    ...[...groups.values()].map(islandEntry)));
  panel.append(part("All ops in fp32, by reason, the costliest first", ...tables.stayed.map(({ reason, nodes, cost }) =>
    h("details", {}, h("summary", {}, reason, h("small", {}, " " + plural(nodes.length, "op") + ", " + cost)), nodeList(nodes)))));
}

function islandEntry(alike) {
  const [first] = alike;
  const titles = [...new Set(first.nodes.map((n) => state.graph.nodes[n].title))];
  const shown = titles.slice(0, 6).join(", ") + (titles.length > 6 ? ", \u2026" : "");
  const times = alike.length > 1 ? " \u00d7 " + alike.length : "";
  const size = [plural(first.nodes.length, "op"), inBytes(first.bytes), plural(first.casts, "cast") + " at its edges"];
  const decided = first.decided_by.length ? first.decided_by : first.nodes;
  return h("article", { class: "island" },
    h("h4", {}, shown + times),
    h("p", { class: "note" }, size.join(" \u00b7 ")),
    h("p", {}, h("b", {}, first.decided_by.length ? "Decided by" : "By price")),
    h("ul", { class: "nodes" }, examples(decided).map((n) =>
      h("li", {}, nodeButton(n), h("span", {}, " \u2013 " + whyHigh(state.graph.nodes[n].decision))))),
    h("p", {}, h("b", {}, alike.length > 1 ? "Places" : "Place")),
    h("p", { class: "places" }, inOrder(alike).map(([place, island]) => h("button", {
      type: "button", class: "link place", onclick: () => goToIsland(island),
    }, place))),
    alike.length === 1 ? h("details", {}, h("summary", {}, plural(decided.length, "op") + " that decided"), nodeList(decided)) : "");
}

/** The first op of each reason, at most three. */
function examples(decided) {
  const firsts = new Map();
  for (const n of decided) {
    const { heading } = state.graph.nodes[n].decision;
    if (!firsts.has(heading)) firsts.set(heading, n);
  }
  return [...firsts.values()].slice(0, 3);
}

const whyHigh = ({ rule, reason }) => (reason === "because of this rule" ? rule : rule + "; " + reason);

/** [place, island] pairs by place, with a number where one place has several islands. */
function inOrder(alike) {
  const seen = new Map();
  return alike.map((island) => [placeOf(island), island])
    .sort(([a, one], [b, two]) => a.localeCompare(b, "en", { numeric: true }) || one.nodes[0] - two.nodes[0])
    .map(([place, island]) => {
      const times = (seen.get(place) ?? 0) + 1;
      seen.set(place, times);
      return [times > 1 ? place + " (" + times + ")" : place, island];
    });
}

/** The deepest module that holds all of an island. */
function placeOf({ modules }) {
  const paths = modules.map((path) => path.split("."));
  const same = [];
  while (paths.length && paths.every((p) => same.length < p.length && p[same.length] === paths[0][same.length])) {
    same.push(paths[0][same.length]);
  }
  return same.join(".") || report.model;
}

function goToIsland(island) {
  if (!state.islands) filterIslands(true);
  if (state.side === "before") showSide("after");
  const nodes = island.nodes.map((n) => state.graph.nodes[n]);
  if (nodes.length <= MOST_AT_FIRST) for (const node of nodes) reveal(node);
  const decided = state.graph.nodes[(island.decided_by[0] ?? island.nodes[0])];
  go(decided);
  showTab("reasons");
}

function showLegend() {
  const list = document.getElementById("legend");
  const low = report.compute_dtype ?? "low";
  const present = new Set(state.graph.nodes.filter((n) => isDrawn(n, state.side)).map((n) =>
    n.kind === "weight" ? "weight" : n.kind === "cast" ? (n.cast.every_call ? "cast" : "cast kept") : precisionClass(n[state.side].precision)));
  const entries = [["low", low], ["fp32", "fp32"], ["other", "other float"], ["none", "not a float"],
    ["weight", "weight"], ["cast", "cast"], ["cast kept", "weight cast, kept between calls"]];
  list.replaceChildren(...(state.heat ? heatLegend() : entries.filter(([kind]) => present.has(kind)).map(([kind, text]) =>
    h("li", {}, h("span", { class: "swatch " + kind }), text))));
}
