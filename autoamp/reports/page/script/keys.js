// The keys of the page, and the actions that they start.

const KEYS = [
  ["/", "search"], ["Arrows", "move between nodes and modules"],
  ["Enter", "open or close a module; show the details of a node"],
  ["Shift+Enter", "close the module around"], ["Escape", "close the details"],
  ["b", "before or after the casts"], ["i", "fp32 islands"], ["h", "heat: colour by predicted cost"],
  ["Shift+E", "expand all"], ["Shift+C", "collapse to the first view"],
  ["+  \u2212  0", "zoom in, zoom out, fit"], ["t", "light or dark"], ["?", "these keys"],
  ["Wheel, drag", "move the graph; with Ctrl the wheel zooms"],
];

/** The point from which the arrow keys measure; for an open module, in its header. */
function pointOf({ x, y, w, h, isOpen: open }) {
  return { x: open ? x + 40 : x + w / 2, y: y + (open ? SIZES.header / 2 : h / 2) };
}

/** The item next to the current item in a direction, or undefined. */
function nextItem(key) {
  const here = pointOf(state.shown.get(state.at));
  const [dx, dy] = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[key];
  let [best, least] = [undefined, Infinity];
  for (const [id, box] of state.shown) {
    const there = pointOf(box);
    const along = (there.x - here.x) * dx + (there.y - here.y) * dy;
    const aside = Math.abs((there.x - here.x) * dy) + Math.abs((there.y - here.y) * dx);
    const cost = along + 2 * aside;
    if (id !== state.at && along > 3 && cost < least) [best, least] = [id, cost];
  }
  return best;
}

function moveTo(id) {
  state.at = id;
  mark();
  const box = state.shown.get(id);
  bringIn(box.isOpen ? { ...box, h: SIZES.header, w: Math.min(box.w, 300) } : box);
  box.element.focus({ preventScroll: true });
}

/** Opens or closes a module; shows the details of a module or node. */
function act(item) {
  if (item.isGroup) toggle(item);
  pick(item.id);
}

function keysInGraph(event) {
  const item = itemOf(state.graph, state.at);
  if (event.key.startsWith("Arrow")) {
    const next = nextItem(event.key);
    if (next) moveTo(next);
  } else if (event.key === "Enter" && event.shiftKey) {
    const around = item.isGroup ? item.parent : item.group;
    if (around > 0) toggle(state.graph.groups[around]);
  } else if (event.key === "Enter" || event.key === " ") act(item);
  else return false;
  return true;
}

const ACTIONS = {
  "/": () => { searchBox.focus(); searchBox.select(); },
  b: () => showSide(state.side === "after" ? "before" : "after"),
  i: () => filterIslands(!state.islands), h: () => showHeat(!state.heat),
  E: expandAll, C: collapseAll, t: switchTheme, "?": () => document.getElementById("keys").showModal(),
  "+": () => zoomBy(1.25), "=": () => zoomBy(1.25), "-": () => zoomBy(0.8), 0: () => fitTo(whole()),
  Escape: () => state.picked && closeNode(),
};

function listenToKeys() {
  document.getElementById("keys-list").append(...KEYS.flatMap(([key, text]) =>
    [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, dialog")) return;
    if (event.target.closest("#view") && state.at && keysInGraph(event)) event.preventDefault();
    else if (Object.hasOwn(ACTIONS, event.key)) {
      event.preventDefault();
      ACTIONS[event.key]();
    }
  });
}

/** Switches between light and dark; at first the system's choice is in force. */
function switchTheme() {
  const { dataset } = document.documentElement;
  const isDark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = isDark ? "light" : "dark";
}
