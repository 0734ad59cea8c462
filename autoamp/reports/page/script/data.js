// The report, and for each graph the index that drawing needs.
//
// An item is a node ("n12") or a group, that is a module ("g3").  A side is "before" or
// "after".  Every edge of a side is lifted: it is drawn in the innermost group that holds
// both of its ends, between the two items that hold the ends; inside each group that the
// edge enters or leaves, the edge runs from the port "in" or to the port "out".

const report = JSON.parse(document.getElementById("data").textContent);
const SIDES = ["before", "after"];
const CASTS = new Set(["cast"]);

/** Whether a node is drawn on a side; plumbing is drawn on demand. */
const isDrawn = (node, side) => Boolean(node[side]) && (!node.is_plumbing || state.plumbing);

/** The index of one graph of the report. */
function indexGraph(raw) {
  const groups = raw.groups.map((g, i) => ({
    ...g, id: "g" + i, index: i, isGroup: true, children: [], nodes: [], inside: 0,
    depth: g.parent < 0 ? 0 : -1,
  }));
  for (const group of groups.slice(1)) {
    group.depth = groups[group.parent].depth + 1;
    groups[group.parent].children.push(group);
  }
  const nodes = raw.nodes.map((n, i) => ({ ...n, id: "n" + i, index: i }));
  for (const node of nodes) groups[node.group].nodes.push(node);
  const islandOf = new Map();
  raw.islands.forEach((island, i) => {
    for (const n of island.nodes) if (island.is_between) islandOf.set(n, i);
  });
  const graph = { raw, groups, nodes, islandOf, sides: {} };
  for (const side of SIDES) graph.sides[side] = indexSide(graph, side);
  return graph;
}

/** The edges, readers and counts of one side of a graph. */
function indexSide({ groups, nodes, islandOf }, side) {
  const readers = nodes.map(() => []);
  const edges = groups.map(() => new Map());
  const counts = groups.map(() => ({ nodes: 0, low: 0, fp32: 0, casts: 0, islands: new Set() }));
  const add = (group, from, to, pair) => {
    const key = from + ">" + to;
    const found = edges[group].get(key);
    if (found) found.pairs.push(pair);
    else edges[group].set(key, { from, to, pairs: [pair] });
  };
  for (const node of nodes) {
    if (!node[side]) continue;
    const isShown = isDrawn(node, side);
    if (isShown) count(groups, counts, node, side, islandOf);
    for (const operand of node[side].operands) {
      readers[operand].push(node.index);
      if (isShown && isDrawn(nodes[operand], side)) lift(groups, nodes[operand], node, add);
    }
  }
  return { readers, edges: edges.map((e) => [...e.values()]), counts };
}

function count(groups, counts, node, side, islandOf) {
  for (let g = node.group; g >= 0; g = groups[g].parent) {
    const here = counts[g];
    here.nodes += 1;
    if (CASTS.has(node.kind)) here.casts += 1;
    if (node.decision) here[side === "after" && node.decision.precision !== report.dtypes.high ? "low" : "fp32"] += 1;
    if (islandOf.has(node.index)) here.islands.add(islandOf.get(node.index));
  }
}

/** Adds the edge from node `u` to node `v` to every group that draws a part of it. */
function lift(groups, u, v, add) {
  const pair = [u.index, v.index];
  let [a, b] = [u.id, v.id];
  let [ga, gb] = [u.group, v.group];
  while (ga !== gb) {
    if (groups[ga].depth >= groups[gb].depth) {
      add(ga, a, "out", pair);
      [a, ga] = [groups[ga].id, groups[ga].parent];
    } else {
      add(gb, "in", b, pair);
      [b, gb] = [groups[gb].id, groups[gb].parent];
    }
  }
  if (a !== b) add(ga, a, b, pair);
}

/** The node or group with an id. */
function itemOf(graph, id) {
  const index = Number(id.slice(1));
  return id[0] === "g" ? graph.groups[index] : graph.nodes[index];
}

/** The colour class of a precision: "none", "fp32", "low" or "other". */
function precisionClass(precision) {
  if (!precision) return "none";
  if (precision === report.dtypes.high) return "fp32";
  return report.dtypes.low.includes(precision) ? "low" : "other";
}

// One format for all numbers, since `toLocaleString` makes a new one at each call.
const numbers = new Intl.NumberFormat("en");
const grouped = (n) => numbers.format(n);
const plural = (n, noun) => grouped(n) + " " + noun + (n === 1 ? "" : "s");

/** A number with three figures and the unit that fits: 1.25 ms, 4.1 kB. */
function inUnits(value, units) {
  let [size, step] = [Math.abs(value), 0];
  while (size >= 999.5 && step < units.length - 1) [size, step] = [size / 1000, step + 1];
  const digits = step === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return (value < 0 ? "\u2212" : "") + size.toFixed(digits) + "\u00a0" + units[step];
}
const inBytes = (count) => inUnits(count, ["B", "kB", "MB", "GB", "TB"]);

/** A cost, in units of 0.1 ns, as a time. */
function amount(cost, signed = false) {
  const text = inUnits(cost / 10, ["ns", "\u00b5s", "ms", "s"]);
  return signed && cost > 0 ? "+" + text : text;
}
