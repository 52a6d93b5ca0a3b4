"""The API's documentation: `openapi`, made from the table of calls, and `page`, which shows it."""
