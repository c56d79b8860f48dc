"""Holds conversations: messages, the ids that they became, and what both caches keep of them. Knows no terminal."""
