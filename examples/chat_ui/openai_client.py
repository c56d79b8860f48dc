"""Talks to `outrider serve` with OpenAI's own client, and streams the answer.

python examples/chat_ui/openai_client.py [--completion] "a question"
"""

from __future__ import annotations

import os
import sys

from openai import BadRequestError, OpenAI


def main(arguments: list[str]) -> None:
    """Prints the answer piece by piece, then how many tokens the device had drafted."""
    words = " ".join(each for each in arguments if each != "--completion")
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8077/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
    )
    model = client.models.list().data[0].id
    common = {"model": model, "max_tokens": 64, "seed": 7, "stream": True, "stream_options": {"include_usage": True}}
    if "--completion" in arguments:
        stream = client.completions.create(prompt=words, **common)
    else:
        try:
            stream = client.chat.completions.create(messages=[{"role": "user", "content": words}], **common)
        except BadRequestError as error:
            advice = "; add --completion" if error.code == "no_chat_template" else ""
            sys.exit(f"{error.body['message']}{advice}")
    usage = None
    for chunk in stream:
        for choice in chunk.choices:
            piece = choice.text if "--completion" in arguments else choice.delta.content
            print(piece or "", end="", flush=True)
        usage = chunk.usage or usage
    drafted = usage.completion_tokens_details.accepted_prediction_tokens
    print(f"\n[{usage.completion_tokens} tokens, {drafted} of them drafted here]", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
