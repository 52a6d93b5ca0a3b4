"""The topics that are served: `live_topics` creates, opens, changes and deletes them.
`coordinator_log` is a topic in which a coordinator keeps what it knows.
"""
