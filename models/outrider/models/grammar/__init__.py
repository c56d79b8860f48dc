"""Holds a text to a grammar: JSON schema, regular expression, context-free grammar or choice. Knows no model."""
