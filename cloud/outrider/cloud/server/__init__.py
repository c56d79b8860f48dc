"""The server process: options, sockets, signals, logs."""
