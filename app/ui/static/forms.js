// The settings of a conversation, and import and export: these talk to the API and then refresh the page.

function problem(box, words) {
  const note = box.querySelector(".tc-problem");
  note.textContent = words;
  note.hidden = !words;
}

const settings = dialog("settings");
const settingsForm = settings.querySelector("form");
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

here.ask_settings = async (target) => {
  settingsForm.reset();
  problem(settings, "");
  settings.dataset.id = target.dataset.id;
  settingsForm.elements.max_tokens.placeholder = target.dataset.longest ?? "";
  settings.kept = {};
  try {
    if (target.dataset.id) {
      const found = await api("GET", `/api/conversations/${encodeURIComponent(target.dataset.id)}`);
      settingsForm.elements.system_prompt.value = found.system_prompt;
      for (const name of NUMBERS) settingsForm.elements[name].value = found.settings[name] ?? "";
      settings.kept = found.settings;
    }
  } catch (error) { return void say(error.message); }
  settings.showModal();
};

// What is typed next must go to the conversation that was just made.
async function untilShown(id) {
  const field = document.querySelector("#tc-conversation :is(input, textarea)");
  for (let tries = 0; tries < 50 && field?.value !== id; tries += 1) {
    await new Promise((wake) => { setTimeout(wake, 60); });
  }
}

settingsForm.addEventListener("submit", async (event) => {
  event.preventDefault();
  const values = { ...settings.kept };
  for (const name of NUMBERS) {
    const text = settingsForm.elements[name].value;
    if (text === "") delete values[name];
    else values[name] = Number(text);
  }
  const change = { system_prompt: settingsForm.elements.system_prompt.value, settings: values };
  const { id } = settings.dataset;
  try {
    if (id) {
      await api("PATCH", `/api/conversations/${encodeURIComponent(id)}`, change);
      trigger("refresh", {});
    } else {
      const made = (await api("POST", "/api/conversations", change)).id;
      trigger("open_chat", { id: made });
      await untilShown(made);
    }
    settings.close();
    say("Saved");
  } catch (error) { problem(settings, error.message); }
});

const data = dialog("data");
const done = data.querySelector(".tc-done");
here.ask_data = () => {
  problem(data, "");
  done.hidden = true;
  data.showModal();
};
data.querySelector("input[type=file]").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  const label = data.querySelector(".tc-file");
  problem(data, "");
  done.hidden = true;
  label.classList.add("tc-busy");
  try {
    const found = await api("POST", "/api/import", file);
    const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
    const left = found.skipped_messages ? ` ${count(found.skipped_messages, "message")} that cannot be shown here, such as calls of tools, were left out.` : "";
    done.textContent = `${count(found.conversations.length, "conversation")} with ${count(found.messages, "message")} imported.${left}`;
    done.hidden = false;
    trigger("refresh", {});
  } catch (error) { problem(data, error.message); }
  label.classList.remove("tc-busy");
  event.target.value = "";
});
