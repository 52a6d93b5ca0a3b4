"""Who may call: `check` uses `tokens`, `scopes` (the table) and `client_rates`."""
