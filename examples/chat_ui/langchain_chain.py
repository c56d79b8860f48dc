"""Runs a LangChain chain on `outrider serve`.

python examples/chat_ui/langchain_chain.py [--completion] "a topic"
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8077/v1")
KEY = os.environ.get("OPENAI_API_KEY", "unused")


def first_model() -> str:
    """The name of the one target."""
    request = urllib.request.Request(f"{URL}/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["data"][0]["id"])


def main(arguments: list[str]) -> None:
    """Prints what the chain gives, streamed."""
    topic = " ".join(each for each in arguments if each != "--completion")
    common = {"base_url": URL, "api_key": KEY, "model": first_model(), "max_tokens": 64, "seed": 7}
    if "--completion" in arguments:
        chain = PromptTemplate.from_template("# {topic}\n") | OpenAI(**common) | StrOutputParser()
    else:
        prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "Tell me about {topic}.")])
        chain = prompt | ChatOpenAI(**common) | StrOutputParser()
    for piece in chain.stream({"topic": topic}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1:])
