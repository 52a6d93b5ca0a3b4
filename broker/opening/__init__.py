"""From a folder on disk to a log that is served: adopted from Kafka, taken over from another
folder, or opened as it was left. `log_opener` leads.
"""
