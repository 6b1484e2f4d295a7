"""CHAT TEMPLATES: turn conversations into prompts, by templates that strangers wrote, in the sandbox."""
