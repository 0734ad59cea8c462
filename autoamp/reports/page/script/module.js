// The panel of a selected module: its ops, casts, islands and time, and the cost of all its
// ops in one precision.

/** Whether a node stands in a group, at any depth. */
function isInside(node, group) {
  let g = node.group;
  while (g > group.index) g = state.graph.groups[g].parent; // parents stand first
  return g === group.index;
}

function moduleDetails(group) {
  const nodes = state.graph.nodes.filter((n) => isDrawn(n, state.side) && isInside(n, group));
  const isBefore = state.side === "before";
  const high = isBefore ? [] : nodes.filter((n) => n.decision?.precision === report.dtypes.high);
  const casts = nodes.filter((n) => n.cast);
  const list = (some) => nodeList(some.map((n) => n.index));
  return [
    group.folds ? h("p", {}, plural(group.folds, "block") + " that are alike: the same ops, shapes and precisions. A click on the box unfolds them.") : "",
    part("In figures", facts(moduleFigures(group, isBefore))),
    ...(isBefore ? [] : [inFp32(group), inLow(group)]),
    high.length ? part("Ops in fp32 here, and why", ...byReason(high).map(([reason, some]) =>
      h("details", {}, h("summary", {}, reason, h("small", {}, " " + plural(some.length, "op"))), list(some)))) : "",
    casts.length ? part("Casts here", list(casts)) : "",
  ];
}

function moduleFigures(group, isBefore) {
  const { low, fp32, casts, islands } = state.graph.sides[state.side].counts[group.index];
  const { costs } = group;
  const all = state.graph.groups[0].costs;
  const share = (part, whole) => (whole ? Math.round((100 * part) / whole) + "% of the graph" : "");
  return [
    ["Time", (isBefore ? amount(costs.fp32) + " in fp32" : amount(costs.placed)) + ", predicted"],

    ["In fp32", isBefore ? "" : amount(costs.fp32)],
    ["Share", isBefore ? share(costs.fp32, all.fp32) : share(costs.placed, all.placed)],
    ["Ops", isBefore ? plural(fp32, "op") + " in fp32" : grouped(low) + " in " + state.graph.raw.compute_dtype + ", " + grouped(fp32) + " in fp32"],
    ["Casts", isBefore ? "" : grouped(casts)],
    ["fp32 islands", isBefore ? "" : grouped(islands.size)],
  ];
}

/** The cost of keeping all ops of a module in fp32. */
function inFp32({ path, is_part: isPart, costs: { keep } }) {
  if (!keep) return "";
  const option = `keep=["${path}"]`;
  const words = path && !isPart ? [h("p", { class: "note" }, h("code", {}, option), " ", copyButton(option), " keeps the module in fp32. Ops behind the module that read its fp32 values may then stay in fp32 too.")] : [];
  return part("All of it in fp32 instead", h("p", {}, held(keep)), ...words);
}

/** The cost of lowering all ops of a module that may be low. */
function inLow({ costs: { lower } }) {
  return lower ? part("All that may be in " + state.graph.raw.compute_dtype + " instead", h("p", {}, held(lower))) : "";
}

function held({ ops, extra, why }) {
  if (extra === null) return "Impossible: " + why + ".";
  return amount(extra, true) + " predicted time, with " + plural(ops, "op") + " changed.";
}

function byReason(nodes) {
  const groups = new Map();
  for (const node of nodes) groups.set(node.decision.heading, [...(groups.get(node.decision.heading) ?? []), node]);
  return [...groups].sort(([, a], [, b]) => b.length - a.length);
}
