"""Recent texts by owner and prompt, for requests that repeat a prompt: in this process, or in Redis for replicas."""
