// The state of the page, and the actions that change it.

const MOST_AT_FIRST = 40; // items in the first view

const state = {
  graph: null, side: "after", open: new Set(), layouts: null,
  picked: null, // id of the node or module whose details are shown
  at: null, // id of the item that Tab reaches, from which the arrow keys start
  wrapped: false, // whether tall groups are laid out in columns
  plumbing: false, // whether running statistics and counters are drawn
  heat: false, // whether items are coloured by their cost
  islands: false, shown: new Map(), edges: [],
};
const indexed = new Map();

const said = document.getElementById("said");
const isOpen = (group) => group.parent < 0 || state.open.has(group.index);
const root = () => state.graph.groups[0];

/** Shows graph `number` of the report. */
function showGraph(number) {
  if (!indexed.has(number)) indexed.set(number, indexGraph(report.graphs[number]));
  state.graph = indexed.get(number);
  Object.assign(state, { picked: null, at: null, open: openAtFirst(), wrapped: false });
  renew();
  fitTo(whole(), LEGIBLE);
  showOverview();
  showReasons();
  showNode(null);
  document.getElementById("plumbing").hidden = !state.graph.nodes.some((n) => n.is_plumbing);
  remember();
}

/** Draws the running statistics and counters, or leaves them out. */
function showPlumbing(on) {
  state.plumbing = on;
  document.getElementById("plumbing").setAttribute("aria-pressed", String(on));
  indexed.clear();
  const number = report.graphs.indexOf(state.graph.raw);
  indexed.set(number, (state.graph = indexGraph(report.graphs[number])));
  if (state.picked && !on && itemOf(state.graph, state.picked).is_plumbing) pick(null);
  renew(state.at);
  said.textContent = on ? "Plumbing is shown" : "Plumbing is hidden";
}

/** Opens level after level while the view stays small enough to read. */
function openAtFirst() {
  const { groups, sides } = state.graph;
  const { counts } = sides[state.side];
  const items = (g) => g.children.filter((c) => counts[c.index].nodes).length +
    g.nodes.filter((n) => isDrawn(n, state.side)).length;
  const open = new Set();
  let [level, shown] = [[groups[0]], items(groups[0])];
  while (level.length) {
    const next = level.flatMap((g) => g.children).filter((g) => counts[g.index].nodes && !g.folds);
    // Beside a fold nothing is opened: the modules around it stand in one view with it.
    if (level.some((g) => g.children.some((c) => c.folds))) break;
    const grown = shown + next.reduce((sum, g) => sum + items(g), 0);
    if (grown > MOST_AT_FIRST) {
      openModules(level, items, open, shown);
      break;
    }
    for (const group of next) open.add(group.index);
    [level, shown] = [next, grown];
  }
  return open;
}

/**
 * Opens the modules that hold modules, where a whole level would be too much.  Of many
 * modules side by side (the layers of a model) either all are opened or none is.
 */
function openModules(level, items, open, shown) {
  for (const parent of level) {
    const inner = parent.children.filter((g) => g.children.length && items(g) && !g.folds);
    const size = inner.reduce((sum, g) => sum + items(g), 0);
    if (inner.length > 3 && shown + size > MOST_AT_FIRST) continue;
    const opened = [];
    for (const group of inner) {
      if (shown + items(group) > MOST_AT_FIRST) break;
      open.add(group.index);
      shown += items(group);
      opened.push(group);
    }
    shown = openModules(opened, items, open, shown);
  }
  return shown;
}

/** Places and draws everything anew. */
function renew(keep) {
  state.layouts = new OpenLayouts(state.graph, state.side, isOpen, state.wrapped);
  render(keep);
}

/** Draws the layouts; the top middle of item `keep` stays where it is in the window. */
function render(keep) {
  const before = keep && state.shown.get(keep);
  const hadFocus = document.activeElement?.closest?.("#view");
  Object.assign(state, drawAll(viewElement, state.graph, state.side, state.layouts.of(root())));
  const after = before && state.shown.get(keep);
  if (after) {
    view.x += (before.x + before.w / 2 - after.x - after.w / 2) * view.k;
    view.y += (before.y - after.y) * view.k;
  }
  drawMap();
  applyView();
  paintHeat();
  mark();
  if (hadFocus && state.at) state.shown.get(state.at).element.focus({ preventScroll: true });
}

function whole() {
  const { w, h } = state.layouts.of(root());
  return { x: 0, y: 0, w: Math.max(w, 1), h: Math.max(h, 1) };
}

/** Opens or closes a module. */
function toggle(group) {
  if (group.parent < 0) return;
  const opens = !state.open.has(group.index);
  if (opens) state.open.add(group.index);
  else state.open.delete(group.index);
  state.layouts.forget(group);
  state.at = group.id;
  render(group.id);
  bringIn(state.shown.get(group.id));
  said.textContent = (group.path || group.label) + (opens ? " opened" : " closed");
}

function expandAll() {
  for (const group of state.graph.groups) state.open.add(group.index);
  state.wrapped = true;
  renew();
  fitTo(whole());
}

function collapseAll() {
  state.open = openAtFirst();
  state.wrapped = false;
  renew();
  fitTo(whole(), LEGIBLE);
}

/** Shows the graph before or after the casts. */
function showSide(side) {
  state.side = side;
  for (const each of SIDES) {
    document.getElementById("side-" + each).setAttribute("aria-pressed", String(each === side));
  }
  const was = state.picked && itemOf(state.graph, state.picked);
  if (was && !was.isGroup && !was[side]) pick(null);
  showNode(state.picked && itemOf(state.graph, state.picked));
  renew(state.picked ?? root().children.find((g) => state.shown.has(g.id))?.id);
  if (side === "before" && state.islands) filterIslands(false);
  showOverview();
  showLegend();
  remember();
  said.textContent = side === "before" ? "Graph before the casts" : "Graph after the casts";
}

function filterIslands(on) {
  state.islands = on;
  document.getElementById("islands").setAttribute("aria-pressed", String(on));
  if (on) showTab("reasons");
  mark();
}

/** Opens the modules around an item, as far as they are closed. */
function reveal(item) {
  let opened = null;
  for (let g = item.isGroup ? item.parent : item.group; g > 0; g = state.graph.groups[g].parent) {
    if (state.open.has(g)) continue;
    state.open.add(g);
    opened = opened ?? state.graph.groups[g];
  }
  if (!opened) return;
  state.layouts.forget(opened);
  render();
}

/** Shows the details of a node, opens the modules around it, and brings it into view. */
function go(item, { middle = true, focus = false } = {}) {
  if (!item.isGroup && !item[state.side]) showSide(item.after ? "after" : "before");
  if (item.is_plumbing && !state.plumbing) showPlumbing(true);
  reveal(item);
  state.at = item.id;
  pick(item.id);
  if (view.k < LEGIBLE) zoomBy(LEGIBLE / view.k);
  const box = state.shown.get(item.id);
  bringIn(box, { middle });
  if (focus) box.element.focus({ preventScroll: true });
}

/** Selects a node or module by its id, or nothing. */
function pick(id) {
  state.picked = id;
  if (id) state.at = id;
  showNode(id ? itemOf(state.graph, id) : null);
  if (id) showTab("node");
  mark();
  remember();
}

/** Sets the classes that depend on the selection, the filter and the focus. */
function mark() {
  const picked = state.picked && itemOf(state.graph, state.picked);
  const near = new Set(picked && !picked.isGroup ? neighbours(picked) : []);
  const isPicked = (index) => (picked.isGroup ? isInside(state.graph.nodes[index], picked) : index === picked.index);
  if (!state.shown.has(state.at)) state.at = state.shown.keys().next().value ?? null;
  for (const [id, { item, element }] of state.shown) {
    const dim = state.islands && !holdsIsland(item);
    element.classList.toggle("picked", id === state.picked);
    element.classList.toggle("near", near.has(id));
    element.classList.toggle("dim", dim);
    element.setAttribute("tabindex", id === state.at ? "0" : "-1");
  }
  canvas.classList.toggle("filtering", state.islands);
  canvas.classList.toggle("picking", Boolean(picked));
  for (const { path, pairs } of state.edges) {
    const lit = Boolean(picked) && pairs.some(([u, v]) => isPicked(u) !== isPicked(v));
    path.classList.toggle("lit", lit);
    if (lit) path.parentNode.append(path); // above the edges that it crosses
    path.classList.toggle("dim", state.islands && !pairs.some(([u, v]) => inIsland(u) && inIsland(v)));
  }
}

const inIsland = (index) => state.graph.islandOf.has(index);

function holdsIsland(item) {
  if (!item.isGroup) return inIsland(item.index);
  return state.graph.sides[state.side].counts[item.index].islands.size > 0;
}

/** The ids of the operands and readers of a node. */
function neighbours(node) {
  const { readers } = state.graph.sides[state.side];
  return [...node[state.side].operands, ...readers[node.index]].map((n) => "n" + n);
}
