// Runs once, when the page's shell is on screen. `element` is the shell, `trigger` sends an event to the server.
// Everything clickable of ours carries data-act; one listener serves the list, the footers and the dialogs.
// The files menu.js, thread.js and forms.js follow in the same scope and add to `here`.

const SERVER_ACTS = [
  "open_chat", "new_chat", "rename_chat", "delete_chat", "restore_chat", "archive_chat", "unarchive_chat",
  "show_version", "regenerate_reply", "continue_reply", "show_earlier", "refresh",
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

// Gradio draws its parts one after another: `then` gets an element once it is there.
function whenThere(selector, then) {
  const found = document.querySelector(selector);
  if (found) then(found);
  else requestAnimationFrame(() => whenThere(selector, then));
}

function composer() {
  return document.querySelector("#tc-composer textarea");
}

// Gradio draws the input's buttons without a name, and anew whenever one takes the other's place. They stand in
// the input's label, which would be called after them.
const COMPOSER_BUTTONS = { ".submit-button": "Send the message", ".stop-button": "Stop the reply" };
function nameButtons() {
  composer()?.setAttribute("aria-label", "Message");
  for (const [selector, name] of Object.entries(COMPOSER_BUTTONS)) {
    const button = document.querySelector(`#tc-composer ${selector}`);
    if (button && button.ariaLabel !== name) Object.assign(button, { ariaLabel: name, title: name });
  }
}
whenThere("#tc-composer", (box) => {
  nameButtons();
  new MutationObserver(nameButtons).observe(box, { childList: true, subtree: true });
});

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
document.getElementById("tc-skeleton")?.remove();

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
  cancel(target) {
    target.closest("dialog").close();
  },
};

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-act]");
  // Rendered messages live in .md: whatever a model writes there is never one of our buttons.
  if (!target || target.closest(".md, .tc-thoughts")) return;
  const act = target.dataset.act;
  if (Object.hasOwn(here, act)) {
    here[act](target);
  } else if (SERVER_ACTS.includes(act)) {
    if (target.closest("#tc-menu")) hideMenu();
    trigger(act, { id: target.dataset.id ?? "", step: Number(target.dataset.step ?? 0) });
    target.closest(".tc-toast")?.remove();
    if (narrow.matches && (act === "open_chat" || act === "new_chat")) setNav(false);
    if (!narrow.matches && act === "new_chat") composer()?.focus();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  if (element.querySelector("dialog[open], :popover-open")) return;
  if (narrow.matches && body.classList.contains("tc-nav-open")) return void setNav(false);
  const cancel = document.querySelector('#tc-chat .message-row:has(textarea) + .message-buttons [aria-label="Cancel"]');
  (cancel ?? document.querySelector("#tc-composer .stop-button"))?.click();
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
