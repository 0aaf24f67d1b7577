"""OpenAI's API: its requests checked, its answers built. The routes are in `app.routes`."""
