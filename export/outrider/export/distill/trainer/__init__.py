"""Fine-tuning a draft on its target's own text: what `outrider-export distill` and the reference pair's script share.

Works for any pair of Hugging Face causal models with one tokenizer, and knows nothing of files that hold models or
prompts. In the order of their use: `rollout` (text sampled from the target), `distill` (training), `acceptance` (how
often the picks agree); `attention`, `optim` and `parallel` serve them. Importing this package loads no model library.
"""
