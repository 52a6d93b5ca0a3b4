"""Who may call: `check` asks `tokens`, `scopes` (the table), `host_check` and `client_rates`."""
