"""Fine-tunes a draft on its target's own text, for `outrider-export distill` and for the reference pair's script.

Works for any pair of Hugging Face causal models with one tokenizer, and knows no files of models or prompts. In the
order of use: `rollout` (samples text from the target), `distill` (trains), `acceptance` (measures how often the picks
agree); `optim` and `parallel` serve them. Importing this package loads no model library.
"""
