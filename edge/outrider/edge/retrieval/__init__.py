"""Documents of the user: reads them, finds passages for a question, puts them into prompts."""
