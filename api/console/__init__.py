"""The web console: a read-only page made of HTML fragments. Read `pages` first."""
