"""The browser side of the product: the chat page and the sign-in pages."""

import os

# Read by Gradio when it is first imported, so it is set before any module here imports it.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
