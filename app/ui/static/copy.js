// Copies the new API key. Without this script the key can still be selected by one click.
{
  const button = document.getElementById("copy");
  const secret = document.getElementById("secret");
  button.hidden = false;
  button.addEventListener("click", async () => {
    let copied = true;
    try {
      await navigator.clipboard.writeText(secret.textContent);
    } catch {
      // Without TLS the browser has no clipboard for pages, but still the command.
      getSelection().selectAllChildren(secret);
      copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy key"; }, 2000);
  });
}
