"""The API's documentation, made from the table of calls; `static_pages` shows it."""
