"""CHAT TEMPLATES: conversations into the text of a prompt, by templates that strangers wrote, in a process apart."""
