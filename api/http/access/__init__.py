"""Who may call: `check` uses `tokens` and `scopes` (the table)."""
