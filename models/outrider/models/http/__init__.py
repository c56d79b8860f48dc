"""What every HTTP endpoint of ours shares: OpenAI messages, event streams, limits, keys. Loaded by servers only."""
