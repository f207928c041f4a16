"""Document: what a report says, once, as plain data; and the page and the Markdown made of it."""
