"""The process: command lines, child processes, memory, files that change, counts and traces."""
