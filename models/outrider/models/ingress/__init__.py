"""Lets requests in: sockets, and bounds on connections, headers and time. Extends uvicorn; only servers load it."""
