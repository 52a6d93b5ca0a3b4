"""What `tierlog demo` shows: the flights of 2013 through both tiers, and Spark over them."""
