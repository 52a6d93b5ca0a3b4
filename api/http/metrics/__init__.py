"""What is counted: `table` has the names, `registry` the requests', `broker` asks the broker."""
