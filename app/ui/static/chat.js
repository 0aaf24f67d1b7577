// Runs once, when the page's shell is on screen. `element` is the shell, `trigger` sends an event to the server.
// Everything clickable of ours carries data-act; one listener serves the list, the footers and the dialogs.

const SERVER_ACTS = [
  "open_chat", "new_chat", "rename_chat", "delete_chat", "restore_chat", "show_version", "regenerate_reply",
];
const body = document.body;
const narrow = matchMedia("(max-width: 860px)");
const dialog = (name) => element.querySelector(`#tc-${name}-dialog`);

function setNav(open) {
  body.classList.toggle("tc-nav-open", open);
  body.classList.toggle("tc-nav-shut", !open);
}

function setTheme(dark) {
  body.classList.toggle("dark", dark);
  document.documentElement.classList.toggle("dark", dark);
}

function composer() {
  return document.querySelector("#tc-composer textarea");
}

// The page may be told light or dark here; without a choice it follows the system.
const savedTheme = () => {
  try { return localStorage.getItem("tangram-theme"); } catch { return null; }
};
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const applyTheme = () => setTheme(savedTheme() ? savedTheme() === "dark" : systemDark.matches);
systemDark.addEventListener("change", applyTheme);
applyTheme();
setNav(!narrow.matches);
narrow.addEventListener("change", () => setNav(!narrow.matches));

const here = {
  toggle_nav() {
    setNav(!body.classList.contains("tc-nav-open"));
  },
  toggle_theme() {
    const dark = !body.classList.contains("dark");
    try { localStorage.setItem("tangram-theme", dark ? "dark" : "light"); } catch { /* private mode: not kept */ }
    setTheme(dark);
  },
  dismiss(target) {
    target.closest(".tc-notice").remove();
  },
  ask_rename(target) {
    const box = dialog("rename");
    box.dataset.id = target.dataset.id;
    const field = box.querySelector("input");
    field.value = target.dataset.title;
    box.showModal();
    field.select();
  },
  ask_delete(target) {
    const box = dialog("delete");
    box.dataset.id = target.dataset.id;
    box.querySelector("b").textContent = target.dataset.title;
    box.showModal();
  },
  cancel(target) {
    target.closest("dialog").close();
  },
};

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-act]");
  // Rendered messages live in .md: whatever a model writes there is never one of our buttons.
  if (!target || target.closest(".md")) return;
  const act = target.dataset.act;
  if (here[act]) {
    here[act](target);
  } else if (SERVER_ACTS.includes(act)) {
    trigger(act, { id: target.dataset.id ?? "", step: Number(target.dataset.step ?? 0) });
    if (act === "restore_chat") target.closest(".tc-toast").remove();
    if (narrow.matches && (act === "open_chat" || act === "new_chat")) setNav(false);
    if (!narrow.matches && act === "new_chat") composer()?.focus();
  }
});

for (const name of ["rename", "delete"]) {
  const box = dialog(name);
  box.addEventListener("submit", () => {
    if (name === "rename") {
      trigger("rename_chat", { id: box.dataset.id, title: box.querySelector("input").value });
    } else {
      trigger("delete_chat", { id: box.dataset.id });
    }
  });
  box.addEventListener("click", (event) => {
    if (event.target === box) box.close();
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && narrow.matches) setNav(false);
});
document.addEventListener("click", (event) => {
  // On a narrow screen the page beside the open sidebar is dimmed: a click there closes it.
  if (narrow.matches && event.target.closest("#tc-main") && !event.target.closest("[data-act]")) setNav(false);
});

// What was typed and not sent outlives a reload, also the one that Gradio does when the server comes back.
const DRAFT = "tangram-draft";
addEventListener("pagehide", () => {
  try { sessionStorage.setItem(DRAFT, composer()?.value ?? ""); } catch { /* private mode: not kept */ }
});
function restoreDraft() {
  const box = composer();
  if (!box) return void requestAnimationFrame(restoreDraft);
  let draft = "";
  try { draft = sessionStorage.getItem(DRAFT) ?? ""; sessionStorage.removeItem(DRAFT); } catch { return; }
  if (!draft || box.value) return;
  box.value = draft;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}
restoreDraft();

// A server that came back knows nothing of this page's events: load the page anew, wherever it stood.
const SERVER_POLL_MS = 4000;
setInterval(async () => {
  try {
    const answer = await fetch("gradio_api/app_id");
    if (answer.ok && (await answer.json()).app_id !== window.gradio_config.app_id) location.reload();
  } catch { /* still away: asked again */ }
}, SERVER_POLL_MS);
