"""What the API says of itself: `openapi`, out of the table of calls, and `page`, which shows it."""
