"""Chat templates: turn conversations into prompts. Strangers wrote them, so they run in the sandbox."""
