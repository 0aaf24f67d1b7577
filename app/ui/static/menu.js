// The menu of a conversation, the note of the context meter, and the dialogs that rename and delete.

const menu = element.querySelector("#tc-menu");
const meterNote = element.querySelector("#tc-meter-note");

function hideMenu() {
  if (menu.matches(":popover-open")) menu.hidePopover();
}

// Shows a popover under `anchor`, or above it where there is no room, inside the window.
function showAt(popover, anchor) {
  popover.showPopover();
  const place = anchor.getBoundingClientRect();
  const own = popover.getBoundingClientRect();
  const below = place.bottom + 4 + own.height <= innerHeight - 8;
  const top = below ? place.bottom + 4 : Math.max(8, place.top - own.height - 4);
  const left = Math.min(Math.max(8, place.right - own.width), innerWidth - own.width - 8);
  Object.assign(popover.style, { top: `${top}px`, left: `${left}px` });
}

Object.assign(here, {
  ask_menu(target) {
    const { id, title, archived } = target.dataset;
    for (const entry of menu.querySelectorAll("[data-act]")) {
      entry.dataset.id = id;
      entry.dataset.title = title;
    }
    menu.querySelector('[data-act="archive_chat"]').hidden = Boolean(archived);
    menu.querySelector('[data-act="unarchive_chat"]').hidden = !archived;
    for (const link of menu.querySelectorAll("a[data-format]")) {
      link.href = `/api/conversations/${encodeURIComponent(id)}/export?format=${link.dataset.format}`;
    }
    showAt(menu, target);
    menu.querySelector("[role=menuitem]:not([hidden])").focus();
  },
  ask_rename(target) {
    hideMenu();
    const box = dialog("rename");
    box.dataset.id = target.dataset.id;
    const field = box.querySelector("input");
    field.value = target.dataset.title;
    box.showModal();
    field.select();
  },
  ask_delete(target) {
    hideMenu();
    const box = dialog("delete");
    box.dataset.id = target.dataset.id;
    box.querySelector("b").textContent = target.dataset.title;
    box.showModal();
  },
  show_meter(target) {
    meterNote.textContent = target.dataset.text;
    showAt(meterNote, target);
  },
});

menu.addEventListener("click", (event) => {
  if (event.target.closest("a")) hideMenu();
});
menu.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const entries = [...menu.querySelectorAll("[role=menuitem]:not([hidden])")];
  entries[(entries.indexOf(document.activeElement) + step + entries.length) % entries.length].focus();
});
addEventListener("resize", hideMenu);

for (const name of ["rename", "delete", "settings", "data"]) {
  const box = dialog(name);
  box.addEventListener("mousedown", (event) => {
    if (event.target === box) box.close();
  });
}
dialog("rename").addEventListener("submit", (event) => {
  trigger("rename_chat", { id: event.currentTarget.dataset.id, title: event.currentTarget.querySelector("input").value });
});
dialog("delete").addEventListener("submit", (event) => {
  trigger("delete_chat", { id: event.currentTarget.dataset.id });
});

// Folded or not: what the reader chose outlives the list being drawn anew.
let archiveOpen = null;
document.addEventListener("click", (event) => {
  const summary = event.target.closest(".tc-archive > summary");
  if (summary) archiveOpen = !summary.parentElement.open;
});
whenThere("#tc-conversations", (list) => new MutationObserver(() => {
  const archive = list.querySelector(".tc-archive");
  if (archive && archiveOpen !== null && archive.open !== archiveOpen) archive.open = archiveOpen;
}).observe(list, { childList: true, subtree: true }));
