// The panel beside the graph: its tabs, and the details of one node.

const TABS = ["overview", "reasons", "node"];
const KINDS = {
  op: "op", cast: "cast", weight: "weight", input: "input", constant: "constant",
  state: "running statistic or counter", body: "sub-graph", use: "uses of a cast", output: "output",
};
const MOST_LISTED = 12;

/** A new element; strings among the children become text, never markup. */
function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== ""));
  return element;
}

/** A name that may break after its dots and underscores. */
const breakable = (name) => name.split(/(?<=[_./:])/).flatMap((piece, i) => (i ? [h("wbr"), piece] : [piece]));

function showTab(name) {
  for (const tab of TABS) {
    const button = document.getElementById("tab-" + tab);
    button.setAttribute("aria-selected", String(tab === name));
    button.tabIndex = tab === name ? 0 : -1;
    document.getElementById(tab).hidden = tab !== name;
  }
}

function listenToTabs() {
  TABS.forEach((tab, i) => {
    const button = document.getElementById("tab-" + tab);
    button.addEventListener("click", () => showTab(tab));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = TABS[(i + step + TABS.length) % TABS.length];
      showTab(next);
      document.getElementById("tab-" + next).focus();
    });
  });
}

/** A button that shows a node, with the colour of its precision. */
function nodeButton(index) {
  const node = state.graph.nodes[index];
  const place = node[state.side] ?? node.after ?? node.before;
  const colour = node.kind === "cast" ? "cast" : precisionClass(place.precision);
  return h("button", { type: "button", class: "link", onclick: () => go(node) },
    h("span", { class: "dot " + colour }), node.name);
}

/** A list of nodes, of which the first are shown at once. */
function nodeList(indices) {
  const list = h("ul", { class: "nodes" });
  const add = (some) => list.append(...some.map((n) => h("li", {}, nodeButton(n))));
  add(indices.slice(0, MOST_LISTED));
  const rest = indices.slice(MOST_LISTED);
  if (!rest.length) return list;
  const more = h("button", { type: "button", class: "more" }, "show " + grouped(rest.length) + " more");
  more.addEventListener("click", () => { more.remove(); add(rest); });
  return h("div", {}, list, more);
}

function part(title, ...children) {
  return h("section", {}, h("h3", {}, title), ...children);
}

function facts(pairs) {
  const list = h("dl", {});
  for (const [term, value] of pairs) if (value) list.append(h("dt", {}, term), h("dd", {}, value));
  return list;
}

/** Fills the panel with the details of a node; null for none. */
function showNode(node) {
  const panel = document.getElementById("node");
  panel.replaceChildren();
  if (!node) {
    panel.append(h("p", { class: "hint" }, "Choose a node in the graph to see why it has its precision, or a module to see what it costs."));
    return;
  }
  const close = h("button", { type: "button", class: "close", "aria-label": "Close the details (Escape)", title: "Close (Escape)", onclick: closeNode }, "\u00d7");
  panel.scrollTop = 0;
  if (node.isGroup) {
    panel.append(h("div", { class: "head" }, h("h2", {}, breakable(node.label)), close),
      h("p", { class: "name" }, "module ", h("code", {}, breakable(node.path || report.model))), ...moduleDetails(node));
    return;
  }
  panel.append(
    h("div", { class: "head" }, h("h2", {}, breakable(node.cast ? node.cast.kind + " cast" : node.title)), close),
    h("p", { class: "name" }, h("code", {}, breakable(node.name))),
    chips(node),
    node.decision ? decided(node) : undecided(node),
    node.decision?.root ? rooted(node.decision.root) : "",
    node.decision ? part("In " + node.decision.flip.to + " instead", ...flipped(node.decision.flip)) : "",
    values(node),
    where(node),
    ...links(node),
  );
}

const MOST_LINKS = 6;

/** A link to the root node that makes a node fp32, and the chain between the two. */
function rooted({ node: root, said, chain }) {
  const back = [...chain].reverse();
  const shown = back.length > MOST_LINKS ? [...back.slice(0, MOST_LINKS - 2), null, back.at(-1)] : back;
  const steps = shown.flatMap((n) => [n === null ? "\u2026" : nodeButton(n), " \u2190 "]).slice(0, -1);
  const { title } = state.graph.nodes[root];
  return part("Root", h("p", {}, h("b", {}, "Fp32 because of "), nodeButton(root, title), ": " + said + "."),
    chain.length > 1 ? h("p", { class: "chain" }, ...steps) : "");
}

/** Closes the details, and puts the focus back on the node. */
function closeNode() {
  const id = state.picked;
  pick(null);
  showTab("overview");
  state.shown.get(id)?.element.focus({ preventScroll: true });
}

function chips(node) {
  const [before, after] = [node.before?.precision, node.after?.precision];
  const list = h("p", { class: "chips" }, h("span", { class: "chip" }, KINDS[node.kind]));
  const add = (text, kind) => list.append(h("span", { class: "chip " + kind }, text));
  if (node.decision) add(node.decision.category, "");
  if (before && after && before !== after) add(before + " \u2192 " + after, precisionClass(after));
  else if (after || before) add(after || before, precisionClass(after || before));
  if (!node.after) add("removed by the pass", "");
  return list;
}

function decided({ decision }) {
  const { meaning } = state.graph.raw.tables.ops.find((row) => row.category === decision.category);
  return part("Why " + decision.precision, facts([
    ["Decision", decision.reason],
    ["Category", decision.category + ": " + meaning],
    ["Rule", decision.rule],
    ["From", decision.origin + (decision.listed ? "" : " (no rule lists this op)")],
  ]));
}

function undecided(node) {
  if (!node.cast) return node.note ? part("Why", h("p", {}, "This node " + node.note)) : "";
  const { kind, value, dtype, bytes, every_call: everyCall, compiled } = node.cast;
  const fate = { written: "written to memory", partly: "written, and also read before that inside a kernel", inside: "inside a kernel only", removed: "removed" }[compiled];
  const way = { down: "Rounds", up: "Widens", weight: "Rounds the weight" }[kind];
  const made = state.graph.nodes.find((n) => n.name === value);
  return part("Why", h("p", {}, way + " ", made ? nodeButton(made.index) : value, " to " + dtype +
    ", because its readers compute in " + dtype + "."),
  facts([["Writes", inBytes(bytes)],
    ["When", everyCall ? "at every call" : "kept between calls, made anew when the weight changes"],
    ...(fate ? [["Inductor", fate]] : [])]));
}

/** The cost of the other precision. */
function flipped(flip) {
  if (flip.kind === "never") return [h("p", {}, (flip.to === report.dtypes.high ? "Impossible: " : "Not under these options: ") + flip.why + ".")];
  if (flip.kind === "unknown") {
    return [h("p", {}, "The cost takes long to compute for each op of a graph of this size; report.why() computes it.")];
  }
  const more = flip.more_allow_in_fp32;
  const { compute_dtype: low } = state.graph.raw;
  const { more_kept: bytes } = flip;
  const kept = bytes ? ", and " + inBytes(Math.abs(bytes)) + (bytes > 0 ? " more" : " less") + " kept" : "";
  const ops = more ? ", and " + plural(Math.abs(more), "more allow op") + " in " + (more > 0 ? "fp32" : low) : "";
  const text = amount(flip.extra, true) + " predicted time" + kept + ops + ".";
  const casts = (list) => list.map(([value, dtype]) => value + " to " + dtype).join(", ");
  return [h("p", {}, text), facts([
    ["Casts added", casts(flip.appear)], ["Casts removed", casts(flip.vanish)],
    ["Would change too", flip.along.slice(0, MOST_LISTED).join(", ") +
      (flip.along.length > MOST_LISTED ? " and " + (flip.along.length - MOST_LISTED) + " more" : "")],
  ])];
}

function values(node) {
  const lines = (place) => place?.values.join("\n") || "";
  const [before, after] = [lines(node.before), lines(node.after)];
  const code = (text) => text && h("code", { class: "lines" }, text);
  const rows = before === after ? [["Shape", code(before)]] : [["Before", code(before)], ["After", code(after)]];
  const cost = costOf(node);
  if (cost !== null) rows.push(["Time", amount(cost) + ", predicted"]);
  if (node.decision?.bytes) rows.push(["Traffic", inBytes(node.decision.bytes) + " read and written in fp32"]);
  return before || after ? part("Values", facts(rows)) : "";
}

function where(node) {
  const group = state.graph.groups[node.group];
  const module = group.path && h("button", { type: "button", class: "link", onclick: () => go(group) }, breakable(group.path));
  const rows = facts([
    ["Op", node.kind === "op" ? h("code", {}, breakable(node.op)) : ""],
    ["Module", module],
    ["Line", node.source && h("code", { class: "lines" }, node.source)],
  ]);
  return rows.childElementCount ? part("Where", rows) : "";
}

function links(node) {
  const place = node[state.side] ?? node.after ?? node.before;
  const side = node[state.side] ? state.side : node.after ? "after" : "before";
  const readers = state.graph.sides[side].readers[node.index];
  const bodies = [node, ...place.operands.map((n) => state.graph.nodes[n])].map((n) => n.body).filter(Boolean);
  return [
    bodies.length ? part("Sub-graphs", ...bodies.map(bodyButton)) : "",
    place.operands.length ? part("Reads", nodeList(place.operands)) : "",
    readers.length ? part("Read by", nodeList(readers)) : "",
  ];
}

function bodyButton(key) {
  const number = report.graphs.findIndex((g) => g.key === key);
  return h("button", { type: "button", class: "link", onclick: () => chooseGraph(number) }, "open " + report.graphs[number].title);
}
