"""Reads what comes in: model directories, hub ids, prompts."""
