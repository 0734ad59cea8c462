// The address of what is shown: "#node=add_1" or "#module=h.0.attn", so that a link leads
// there and Back returns.  "graph", "side" and "number" stand in it where they are needed.

let isRestoring = false; // while the page follows its address, nothing is written to it
let address = "";

/** The items with the name of a link: a module may be drawn in parts, or once per call. */
function namesakes(kind, name) {
  const { nodes, groups } = state.graph;
  return kind === "node" ? nodes.filter((n) => n.name === name) : groups.filter((g) => (g.path || g.label) === name);
}

function addressOf() {
  const words = new URLSearchParams();
  if (state.graph.raw !== report.graphs[0]) words.set("graph", state.graph.raw.key);
  if (state.side === "before") words.set("side", "before");
  const item = state.picked && itemOf(state.graph, state.picked);
  if (item) {
    const [kind, name] = item.isGroup ? ["module", item.path || item.label] : ["node", item.name];
    const place = namesakes(kind, name).indexOf(item);
    words.set(kind, name);
    if (place > 0) words.set("number", String(place + 1));
  }
  return words.toString();
}

/** Puts what is shown into the address, as a new entry of the history. */
function remember() {
  const found = addressOf();
  if (isRestoring || found === address) return;
  address = found;
  try {
    history.pushState(null, "", "#" + found);
  } catch {
    // A page inside a notebook may have no address of its own.
  }
}

/** Shows what the address names. */
function restore() {
  address = location.hash.slice(1);
  const words = new URLSearchParams(address);
  const number = report.graphs.findIndex((g) => g.key === words.get("graph"));
  const side = words.get("side") === "before" ? "before" : "after";
  const kind = words.has("node") ? "node" : "module";
  isRestoring = true;
  if (report.graphs[Math.max(number, 0)] !== state.graph.raw) chooseGraph(Math.max(number, 0));
  if (side !== state.side) showSide(side);
  const name = words.get(kind);
  const found = name === null ? [] : namesakes(kind, name);
  const item = found[Number(words.get("number") ?? 1) - 1] ?? found[0];
  if (item) go(item);
  else if (state.picked) closeNode();
  if (name !== null && !item) {
    document.getElementById("node").replaceChildren(h("p", {}, "This graph has no " + kind + " ", h("code", {}, name), "; the search ( / ) finds the names that it has."));
    showTab("node");
  }
  isRestoring = false;
}

function listenToAddress() {
  addEventListener("popstate", restore);
  if (location.hash.length > 1) restore();
}
