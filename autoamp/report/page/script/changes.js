// Two reports side by side: what changed, and the counterpart of a node.

/** The differences in words, and the ops that changed, those of one kind together. */
function changesPart() {
  if (!report.diff) return [];
  const groups = new Map();
  for (const change of state.graph.raw.changes) {
    const node = state.graph.nodes[change.new ?? change.old];
    const key = node.title + ": " + change.text;
    groups.set(key, [...(groups.get(key) ?? []), node.index]);
  }
  const [first, ...rest] = report.diff.sentences;
  // An op that changed says more than one that the other report has not.
  const rank = ([key, nodes]) => nodes.length + (key.includes("\u2192") ? state.graph.nodes.length : 0);
  const kinds = [...groups].sort((a, b) => rank(b) - rank(a));
  return [
    h("section", { class: "verdict" }, h("h2", {}, first), ...rest.map((text) => h("p", {}, text))),
    kinds.length ? part("What changed in this graph", ...kinds.map(([key, nodes], i) =>
      h("details", i ? {} : { open: "" }, h("summary", {}, key, h("small", {}, " " + plural(nodes.length, "op"))), nodeList(nodes, (n) => placed(state.graph.nodes[n]))))) : "",
  ];
}

const placed = ({ name, module }) => (module ? name + " in " + module : name);

/** The counterpart of a node in the other report. */
function counterpart({ twin, change }) {
  if (twin === undefined) return "";
  if (twin === null) return part("In the other report", h("p", {}, "The other report has no such op."));
  const { after, name } = state.graph.nodes[twin];
  const text = change ? "It changed from " + change.old + " to " + change.new + ": " : "The same precision, " + (after?.precision ?? "") + ": ";
  return part("In the other report", h("p", {}, text, nodeButton(twin, name)));
}
