"""Changes a row of logits before the pick, by a state that follows the text: penalties, biases, grammars."""
