"""What a request says, and what is refused of it: body, media types, JSON, times, ranges."""
