"""What a request carries: its body, media types, ranges, times."""
