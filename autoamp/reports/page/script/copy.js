// Buttons that copy one line.

const COPIED_FOR = 1500; // milliseconds

/** A button that copies `text`; `label` says what is copied. */
function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "copy", title: "Copy: " + text, "aria-label": label + ": " + text }, label);
  button.addEventListener("click", async () => {
    const done = await copied(text);
    button.textContent = done ? "Copied" : "Not copied";
    said.textContent = done ? "Copied" : "The browser did not allow the copy";
    setTimeout(() => { button.textContent = label; }, COPIED_FOR);
  });
  return button;
}

/** Whether the text is in the clipboard now; frames without the permission use a selection. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "sr-only" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
