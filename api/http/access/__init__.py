"""Who may call: `check` uses `tokens`, `scopes` (the table), `host_check` and `client_rates`."""
