"""vLLM as the engine: its scheduler verifies drafts from outside, our pick takes the place of its samplers.

In the server run `engine`, `processes`, `open_sequences`, `options`, `parked` and `checks`; in vLLM's engine process
`scheduler`, `faulty_rows`, `engine_process`, `book`, `step_shares` and `proposer`; in its workers `extension`,
`sampler` (V1 runner) and `v2`. `engine_messages` and `terms` are what they share.
"""
