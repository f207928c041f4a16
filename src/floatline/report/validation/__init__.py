"""A validation for people: terminal, page and Markdown from the same facts."""
