"""A broker's interfaces: `protocol`, HTTP/1.1 connections; `http`, the API; `console`, a web page;
`app` assembles them.
"""
