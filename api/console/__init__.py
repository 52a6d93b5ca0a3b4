"""The console: a page of fragments of HTML that only reads. Read `pages` first."""
