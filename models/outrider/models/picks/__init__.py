"""What a token is: sampling with shared noise, and the acceptance rules."""
