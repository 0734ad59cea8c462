// Heat: items coloured by their predicted cost, from none to that of the costliest one shown.

/** The predicted cost of an item on the side that is shown; null where none is known. */
function costOf(item) {
  const isBefore = state.side === "before";
  if (item.isGroup) return isBefore ? item.costs.fp32 : item.costs.placed;
  return item.decision && (isBefore ? item.decision.cost_fp32 : item.decision.cost);
}

const closedShown = () => [...state.shown.values()].filter(({ isOpen: open }) => !open);

/** Colours the items that are drawn, and puts their cost in the place of their shape. */
function paintHeat() {
  canvas.classList.toggle("heated", state.heat);
  if (!state.heat) return;
  const all = costOf(root());
  const found = closedShown().map(({ item, element }) => [costOf(item), element]);
  state.hottest = Math.max(0, ...found.map(([cost]) => cost ?? 0));
  for (const [cost, element] of found) {
    element.classList.toggle("costed", cost !== null);
    if (cost === null) continue;
    element.style.setProperty("--heat", state.hottest ? (100 * cost) / state.hottest + "%" : "0%");
    const text = element.querySelector(".sub");
    const share = element.classList.contains("group") && all ? "  \u00b7  " + Math.round((100 * cost) / all) + "%" : "";
    if (text) text.textContent = amount(cost) + share;
  }
  showLegend();
}

function showHeat(on) {
  state.heat = on;
  document.getElementById("heat").setAttribute("aria-pressed", String(on));
  renew(state.at);
  showLegend();
  said.textContent = on ? "Coloured by cost" : "Coloured by precision";
}

function heatLegend() {
  return [h("li", {}, "0", h("span", { class: "ramp" }), amount(state.hottest ?? 0)), h("li", {}, "predicted time")];
}
